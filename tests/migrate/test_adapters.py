"""LoRA adapters in real requests: separate models to clients, available on every worker, wherever a request goes."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.config_text import parse_config
from melld.engine.arguments import engine_arguments
from melld.errors import ConfigError
from tests.api.http_client import CHAT, chat, request
from tests.migrate.live import GREEDY, Operator, Stream, linked_workers
from tests.serve.daemon_process import DaemonProcess
from tests.tiny_models import make_adapter
from tests.worker_faults import slowed

SHORT = GREEDY | {"max_tokens": 60}
ADAPTERS = ("pirate", "poet")


@pytest.fixture(scope="module")
def adapters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(demo_model, directory / name, seed)
    return directory


@pytest.fixture(scope="module")
def daemon(demo_model: Path, adapters: Path) -> Iterator[DaemonProcess]:
    """Two workers of the demo model, with two adapters."""
    lora = ", ".join(f'{{name = "{name}", path = "{adapters / name}"}}' for name in ADAPTERS)
    with linked_workers(demo_model, "--set", f"model.lora=[{lora}]") as process:
        yield process


def pid_of(operator: Operator, worker: str) -> int:
    return next(int(one["pid"]) for one in operator.status()["workers"] if one["worker"] == worker)


def test_each_adapter_is_a_model_with_its_own_answers(daemon: DaemonProcess, operator: Operator) -> None:
    """It is listed beside its base model, and changes the answers even in shared steps."""
    cards = {card["id"]: card["parent"] for card in json.loads(daemon.get("/v1/models"))["data"]}
    assert cards == {"demo": None, "pirate": "demo", "poet": "demo"}
    alone = [Stream(daemon, SHORT | {"model": name}).result() for name in cards]
    assert len({answer.choices[0].text for answer in alone}) == 3
    streams = [Stream(daemon, SHORT | {"model": name}) for name in cards for _ in range(2)]
    assert [stream.result() for stream in streams] == [answer for answer in alone for _ in range(2)]


@pytest.mark.parametrize("via", ["tokens", pytest.param("kv", marks=pytest.mark.long)])
def test_a_request_moves_with_its_adapter(daemon: DaemonProcess, operator: Operator, via: str) -> None:
    """What is computed after the move uses it."""
    unmoved = Stream(daemon, SHORT | {"model": "poet", "cache_salt": "unmoved"}).result()
    with slowed(daemon.faults):
        stream = Stream(daemon, SHORT | {"model": "poet", "cache_salt": via})
        stream.wait_chunks(12)
        [report] = operator.move(stream, via)
    assert (report["outcome"], report["via"]) == ("committed", via)
    assert stream.result() == unmoved
    assert unmoved.error is None


@pytest.mark.long
def test_a_request_with_an_adapter_survives_its_worker(daemon: DaemonProcess, operator: Operator) -> None:
    """kill -9: it goes on elsewhere, and the worker's next process loads the adapter on demand."""
    unmoved = Stream(daemon, SHORT | {"model": "pirate"}).result()
    with slowed(daemon.faults):
        stream = Stream(daemon, SHORT | {"model": "pirate"})
        stream.wait_chunks(12)
        [one] = operator.requests_of(stream)
        os.kill(pid_of(operator, one["worker"]), signal.SIGKILL)
    assert stream.result() == unmoved
    assert unmoved.error is None


@pytest.mark.long
def test_a_missing_adapter_fails_only_its_own_requests(
    daemon: DaemonProcess, operator: Operator, adapters: Path
) -> None:
    """A worker that started after its files vanished says so, and serves everything else."""
    for worker in ("w0", "w1"):
        pid = pid_of(operator, worker)
        shutil.rmtree(adapters / "poet", ignore_errors=True)
        os.kill(pid, signal.SIGKILL)
        operator.wait_gone(worker, pid)
        operator.wait_ready()
    pids = [pid_of(operator, worker) for worker in ("w0", "w1")]
    for _ in range(2):
        refused = request(daemon.url, "POST", CHAT, chat(model="poet"))
        assert refused.status == 500
        assert "its LoRA adapter cannot be loaded" in refused.json()["error"]["message"]
        for model in ("demo", "pirate"):
            assert request(daemon.url, "POST", CHAT, chat(model=model)).status == 200
    assert pids == [pid_of(operator, worker) for worker in ("w0", "w1")]


def test_unusable_adapters_are_refused_at_the_start(demo_model: Path, tmp_path: Path) -> None:
    """Before anything is loaded, with the name of the adapter."""
    make_adapter(demo_model, tmp_path / "wide", 1, rank=40)
    text = '[model]\npath = "m"\n[[model.lora]]\nname = "{}"\npath = "{}"\n'
    arguments: dict[str, Any] = engine_arguments(parse_config(text.format("wide", tmp_path / "wide"), "x"), "cuda")
    assert (arguments["max_loras"], arguments["max_lora_rank"]) == (1, 64)
    with pytest.raises(ConfigError, match=r"\[\[model.lora\]\] gone.*adapter_config.json"):
        engine_arguments(parse_config(text.format("gone", tmp_path / "gone"), "x"), "cuda")
    with pytest.raises(ConfigError, match="both called 'm'"):
        parse_config(text.format("m", tmp_path / "wide"), "x")
