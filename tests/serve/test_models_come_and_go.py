"""Models that come and go while the daemon runs: by a reload, and by hand."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.config import ModelConfig, kept_of
from tests.api.http_client import COMPLETIONS, chat, request
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model
from tests.tiny_models import make_adapter
from tests.worker_faults import slowed

LONG = {**GREEDY, "max_tokens": 60, "ignore_eos": True}


class Town:
    """A daemon of several models, and its file."""

    def __init__(self, directory: Path, demo: Path) -> None:
        self.demo, self.directory = demo, directory
        self.file = directory / "melld.toml"
        for seed, name in enumerate(("other", "third"), 1):
            make_small_model(directory / name, seed=seed)
        self.lines = {
            "demo": f'{{path = "{demo}", name = "demo"}}',
            "other": f'{{path = "{directory}/other"}}',
            "third": f'{{path = "{directory}/third"}}',
        }
        self.daemon: DaemonProcess

    def write(self, *models: str) -> None:
        """Write a file of these models."""
        listed = ", ".join(self.lines.get(one, one) for one in models)
        devices = '[devices]\ncpu = {count = 1, memory_bytes = "2GiB"}\n'
        log = f'[scheduler]\ndecision_log = "{self.directory}/log.jsonl"\n'
        self.file.write_text(f"models = [{listed}]\n{devices}{log}")

    def reload(self, *models: str) -> str:
        """Write it, have the daemon read it; return what the log says."""
        self.write(*models)
        self.daemon.lines.clear()
        self.daemon.process.send_signal(signal.SIGHUP)
        return self.daemon.wait_for("reload")

    def names(self) -> list[str]:
        return [card["id"] for card in json.loads(self.daemon.get("/v1/models"))["data"]]


@pytest.fixture(scope="module")
def town(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """Two models, and a third that is not in the file yet."""
    town = Town(tmp_path_factory.mktemp("town"), demo_model)
    town.write("demo", "other")
    with DaemonProcess(None, "--config", str(town.file), "--log-level", "info", harmable=True) as town.daemon:
        town.daemon.wait_ready()
        yield town


def text_of(town: Town, model: str) -> str:
    answered = request(town.daemon.url, "POST", COMPLETIONS, {"prompt": "A daemon", "model": model, "temperature": 0})
    assert answered.status == 200, answered.body
    return str(answered.json()["choices"][0]["text"])


def test_a_reload_adds_a_model_beside_a_running_stream(town: Town) -> None:
    """It is loaded at once, as there is room; nobody else's tokens change."""
    quiet = Stream(town.daemon, LONG | {"model": "demo"}).result()
    with slowed(town.daemon.faults):
        stream = Stream(town.daemon, LONG | {"model": "demo"})
        stream.wait_chunks(5)
        assert "reloaded: models, added third" in town.reload("demo", "other", "third")
    assert text_of(town, "third") not in (text_of(town, "demo"), text_of(town, "other"))
    assert stream.result() == quiet
    assert town.names() == ["demo", "other", "third"]
    assert 'model_name="third"' in town.daemon.get("/metrics")


def test_a_removed_model_ends_its_streams_first(town: Town) -> None:
    """New calls hear that there is none; then its memory is free, and its metrics are gone."""
    quiet = Stream(town.daemon, LONG | {"model": "third"}).result()
    with slowed(town.daemon.faults):
        stream = Stream(town.daemon, LONG | {"model": "third"})
        stream.wait_chunks(5)
        assert "removed third" in town.reload("demo", "other")
        assert request(town.daemon.url, "POST", COMPLETIONS, {"prompt": "A", "model": "third"}).status == 404
    assert stream.result() == quiet
    Operator(town.daemon).wait(lambda status: len(status["devices"][0]["models"]) == 2)
    assert {one["model"] for one in town.daemon.status()["workers"]} == {"demo", "other"}
    assert 'model_name="third"' not in town.daemon.get("/metrics")


def test_a_changed_model_is_another_one(town: Town) -> None:
    """Running requests end as they began, new ones get what the file says now, under the same name."""
    before = Stream(town.daemon, LONG | {"model": "other"}).result()
    with slowed(town.daemon.faults):
        stream = Stream(town.daemon, LONG | {"model": "other"})
        stream.wait_chunks(5)
        town.reload("demo", f'{{path = "{town.directory}/third", name = "other"}}')
        after = Stream(town.daemon, LONG | {"model": "other"})
        assert after.result().choices != before.choices
    assert stream.result() == before
    Operator(town.daemon).wait(lambda status: len(status["devices"][0]["models"]) == 2)
    town.reload("demo", "other")
    assert Stream(town.daemon, LONG | {"model": "other"}).result() == before


def test_settings_that_apply_at_once_cost_no_load(town: Town) -> None:
    """A model pinned by a reload stays loaded, and is pinned from now on."""
    text_of(town, "other")
    pids = [one["pid"] for one in town.daemon.status()["workers"]]
    town.reload("demo", f'{{path = "{town.directory}/other", pinned = true, weight = 2.0}}')
    assert [one["pid"] for one in town.daemon.status()["workers"]] == pids
    assert "is pinned" in town.daemon.melld("unload", "other").stderr
    town.reload("demo", "other")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ('{path = "/nowhere"}', "no such directory"),
        ('{path = "%s", name = "more", vllm = {dtype = "wide"}}', "dtype: Input should"),
        ('{path = "%s", name = "more", vllm = {reasoning_parser = "qwen"}}', "did you mean 'qwen3'?"),
        ('{path = "%s", name = "more", vllm = {chat_template = "{{ a"}}', "chat_template"),
    ],
)
def test_an_invalid_file_changes_nothing(town: Town, entry: str, why: str) -> None:
    """One line says why, as `melld check-config` does; what had begun to load is gone."""
    told = town.reload("demo", entry % town.demo if "%s" in entry else entry)
    assert "reload rejected" in told
    assert why in told
    assert town.names() == ["demo", "other"]
    Operator(town.daemon).wait(lambda status: len(status["devices"][0]["models"]) == 2)
    checked = town.daemon.melld("check-config", str(town.file))
    assert (checked.returncode, why in checked.stderr) == (2, True)
    town.reload("demo", "other")


def test_a_rejected_file_leaves_what_is_served_its_log(town: Town) -> None:
    """A model with new settings has the name of the served one, whose log goes on in its file."""
    log, kept = town.directory / "log-other.jsonl", town.directory / "log-other.jsonl.1"
    before = [path.stat().st_ino if path.exists() else 0 for path in (log, kept)]
    changed = f'{{path = "{town.directory}/other", pinned = true, vllm = {{chat_template = "{{{{ a"}}}}'
    assert "reload rejected" in town.reload("demo", changed)
    Operator(town.daemon).wait(lambda status: len(status["devices"][0]["models"]) == 2)
    assert [path.stat().st_ino if path.exists() else 0 for path in (log, kept)] == before
    assert before[0]
    assert town.daemon.melld("unload", "other").stdout == "other: unloaded\n", "it is not pinned"
    town.reload("demo", "other")


def counted(town: Town) -> dict[str, float]:
    """Return how many streamed tool calls vLLM's metrics count, by model."""
    lines = [line for line in town.daemon.get("/metrics").splitlines() if 'mode="streaming"' in line]
    found = {re.findall('model_name="([^"]*)"', line)[0]: 0.0 for line in lines}
    for line in lines:
        if line.startswith("vllm:tool_call_parser_invocations_total{"):
            found[re.findall('model_name="([^"]*)"', line)[0]] += float(line.split()[-1])
    return found


def call_tools(town: Town, model: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    stream = Stream(town.daemon, chat(model=model, tools=[tool], max_tokens=8))
    assert stream.result().error is None


def test_an_added_model_has_its_adapters_and_its_count_of_tool_calls(town: Town) -> None:
    """A reload that is refused later, or another model, takes neither."""
    make_adapter(town.demo, town.directory / "pirate", 0)
    tools = 'vllm = {enable_auto_tool_choice = true, tool_call_parser = "hermes"}'
    lora = f'lora = [{{name = "pirate", path = "{town.directory}/pirate"}}]'
    added = [f'{{path = "{town.demo}", name = "{name}", {tools}}}' for name in ("caller", "bystander")]
    added[0] = f"{added[0][:-1]}, {lora}}}"
    town.reload("demo", "other", *added)
    assert text_of(town, "pirate") != text_of(town, "caller"), "known before its model is loaded"
    call_tools(town, "caller")
    call_tools(town, "pirate")
    refused = f'{{path = "{town.demo}", name = "refused", {tools[:-1]}, chat_template = "{{{{ a"}}}}'
    assert "reload rejected" in town.reload("demo", "other", *added, refused)
    before = counted(town)
    assert before == {"demo": 0.0, "other": 0.0, "caller": before["caller"], "bystander": 0.0}
    call_tools(town, "caller")
    call_tools(town, "bystander")
    after = counted(town)
    assert 0.0 < before["caller"] < after["caller"]
    assert after["bystander"] > 0.0
    assert (after["demo"], after["other"], len(after)) == (0.0, 0.0, 4)
    town.reload("demo", "other")
    Operator(town.daemon).wait(lambda status: len(status["devices"][0]["models"]) == 2)


def test_an_operator_adds_a_model_by_hand(town: Town) -> None:
    """A reload leaves it alone; `unload` removes it, its requests with `--now`."""
    path = str(town.directory / "third")
    assert town.daemon.melld("load", path, "--name", "extra").stdout == "extra: loaded\n"
    town.reload("demo", "other")
    assert town.names() == ["demo", "other", "extra"]
    assert "model 'extra' already exists" in town.daemon.melld("load", path, "--name", "extra").stderr
    stream = Stream(town.daemon, {**LONG, "max_tokens": 4000, "model": "extra"})
    stream.wait_chunks(5)
    assert town.daemon.melld("unload", "extra", "--now").stdout == "extra: unloaded\n"
    assert stream.result().error["code"] == "model_unloaded"
    assert town.names() == ["demo", "other"]


@pytest.mark.long
def test_a_lone_model_gets_a_neighbour_without_a_restart(town: Town, tmp_path: Path) -> None:
    """Its worker and its streams go on, and the other is served beside it; then either may leave for the other."""
    file = tmp_path / "melld.toml"
    devices = '[devices]\ncpu = {count = 1, memory_bytes = "2GiB", kv_bytes = "64MiB"}\n'
    file.write_text(f'[model]\npath = "{town.demo}"\nname = "demo"\n{devices}')
    with DaemonProcess(None, "--config", str(file), "--log-level", "info", harmable=True) as daemon:
        daemon.wait_ready()
        before, quiet = daemon.status()["workers"][0], Stream(daemon, LONG | {"model": "demo"}).result()
        with slowed(daemon.faults):
            stream = Stream(daemon, LONG | {"model": "demo"})
            stream.wait_chunks(5)
            file.write_text(f"models = [{town.lines['demo']}, {town.lines['other']}]\n{devices}")
            daemon.lines.clear()
            daemon.process.send_signal(signal.SIGHUP)
            assert "reloaded: models, added other" in daemon.wait_for("reload")
        other = request(daemon.url, "POST", COMPLETIONS, {"prompt": "A daemon", "model": "other", "temperature": 0})
        assert other.status == 200, other.body
        assert stream.result() == quiet
        assert daemon.status()["workers"][0]["pid"] == before["pid"]
        assert daemon.melld("unload", "demo").stdout == "demo: unloaded\n"
        assert Stream(daemon, LONG | {"model": "demo"}).result() == quiet


def test_only_names_and_vllm_options_make_another_model() -> None:
    """Shares and times do not."""
    one, two = ModelConfig(path="one"), ModelConfig(path="two", vllm={"max_model_len": 10})
    followed: list[Any] = [ModelConfig(path="two", vllm={"max_model_len": 10}, weight=3.0, keep_alive_s=1.0), one]
    assert kept_of([one, two], followed) == [1, 0]
    assert kept_of([one], [ModelConfig(path="one", name="another"), two]) == [None, None]
