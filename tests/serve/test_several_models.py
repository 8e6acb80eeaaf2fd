"""One daemon, several models: each is served as it would be alone, and none harms another."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import COMPLETIONS, Answered, request
from tests.faults.test_tasks import fail
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model
from tests.worker_faults import slowed

TOKEN_BYTES = 4096
"""KV of one token of a small model."""

QUESTION = {"prompt": "The workers of a daemon", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def several(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Three models on one CPU device: one that stays, one that is unloaded when idle, one whose weights are damaged."""
    directory = tmp_path_factory.mktemp("several")
    make_small_model(directory / "other", seed=1)
    shutil.copytree(demo_model, directory / "damaged")
    (weights,) = (directory / "damaged").glob("*.safetensors")
    os.truncate(weights, 1000)
    config = directory / "melld.toml"
    config.write_text(f"""
        models = [
            {{path = "{demo_model}", name = "demo", pinned = true}},
            {{path = "{directory}/other", name = ["other", "gpt-4o"], keep_alive_s = 2}},
            {{path = "{directory}/damaged"}},
        ]
        [devices]
        cpu = {{count = 1, memory_bytes = "1GiB"}}
    """)
    with DaemonProcess(None, "--config", str(config), harmable=True) as process:
        yield process.wait_ready()


def asked(daemon: DaemonProcess, **fields: Any) -> Answered:
    return request(daemon.url, "POST", COMPLETIONS, QUESTION | fields)


def text_of(daemon: DaemonProcess, model: str) -> str:
    answered = asked(daemon, model=model)
    assert answered.status == 200, answered.body
    return str(answered.json()["choices"][0]["text"])


def test_each_model_answers_as_it_would_alone(several: DaemonProcess, demo_model: Path) -> None:
    """The name decides; another of its names is the same model, and no name means the first."""
    demo, other = text_of(several, "demo"), text_of(several, "other")
    with DaemonProcess(demo_model, "--device", "cpu:1") as alone:
        assert demo == text_of(alone.wait_ready(), "demo")
    assert other != demo
    assert text_of(several, "gpt-4o") == other
    assert asked(several).json()["model"] == "demo"


def test_an_unknown_name_is_answered_with_the_known_ones(several: DaemonProcess) -> None:
    """The answer is enough to fix a typo."""
    answered = asked(several, model="dmeo")
    error = answered.json()["error"]
    assert (answered.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "demo, other, gpt-4o, damaged" in error["message"]
    assert asked(several, model=3).status == 400


def test_a_model_that_cannot_be_loaded_harms_no_other(several: DaemonProcess) -> None:
    """Its callers hear why; operators see it in the list; the others are served."""
    answered = asked(several, model="damaged")
    assert answered.status == 503
    assert "damaged could not be loaded: worker w2 on cpu:0 failed to start" in answered.json()["error"]["message"]
    assert int(answered.headers["retry-after"]) >= 1
    states = {card["id"]: card["status"] for card in json.loads(several.get("/v1/models"))["data"]}
    assert states.keys() == {"demo", "other", "gpt-4o", "damaged"}
    assert states["damaged"] == "failed"
    listed = several.melld("models")
    assert listed.returncode == 0
    assert any(
        "damaged" in line and "failed" in line and "failed to start" in line for line in listed.stdout.splitlines()
    )
    assert json.loads(several.get("/ready"))["status"] == "ready"


def test_an_idle_model_is_unloaded_and_returns_with_the_same_answer(several: DaemonProcess) -> None:
    """Its memory is free while it is unused; only the next call waits for its load."""
    before = text_of(several, "other")
    Operator(several).wait(lambda status: status["served"][1]["state"] == "unloaded")
    assert text_of(several, "demo")
    assert text_of(several, "other") == before


def test_a_death_affects_one_model_only(several: DaemonProcess) -> None:
    """The killed worker's stream goes on with the same tokens; the other model's worker and stream notice nothing."""
    long = {**GREEDY, "max_tokens": 60}
    expected = {name: Stream(several, {**long, "model": name}).result() for name in ("demo", "other")}
    with slowed(several.faults):
        streams = {name: Stream(several, {**long, "model": name}) for name in ("demo", "other")}
        for stream in streams.values():
            stream.wait_chunks(20)
        workers = {one["model"]: one for one in several.status()["workers"]}
        os.kill(workers["other"]["pid"], signal.SIGKILL)
    assert {name: stream.result() for name, stream in streams.items()} == expected
    after = {one["model"]: one for one in several.status()["workers"]}
    assert after["demo"]["pid"] == workers["demo"]["pid"]
    assert after["other"]["pid"] != workers["other"]["pid"]


def test_metrics_and_status_tell_the_models_apart(several: DaemonProcess) -> None:
    """In vLLM's metrics and melld's alike."""
    for name in ("demo", "other"):
        text_of(several, name)
    lines = several.get("/metrics").splitlines()
    for metric, label in (("vllm:request_success_total", "model_name"), ("melld_requests_judged_total", "model")):
        of_models = {
            name for name in ("demo", "other") for line in lines if metric in line and f'{label}="{name}"' in line
        }
        assert of_models == {"demo", "other"}, metric
    assert {one["model"] for one in several.status()["workers"]} == {"demo", "other", "damaged"}


def test_an_operator_loads_and_unloads(several: DaemonProcess) -> None:
    """Running requests end first, or at once with an error; a pinned model stays."""
    assert several.melld("load", "gpt-4o").stdout == "other: loaded\n"
    stream = Stream(several, {**GREEDY, "max_tokens": 4000, "ignore_eos": True, "model": "other"})
    stream.wait_chunks(5)
    assert several.melld("unload", "other", "--now").stdout == "other: unloaded\n"
    assert stream.result().error["code"] == "model_unloaded"
    (device,) = several.status()["devices"]
    assert [one["resident_bytes"] for one in device["models"] if one["model"] == "other"] == [0]
    (why,) = [one["why"] for one in several.status()["workers"] if one["model"] == "other"]
    assert re.fullmatch(r"not loaded \(operator\); wakes in about \d+\.\d s", why)
    refused = several.melld("unload", "demo")
    assert (refused.returncode, "demo is pinned" in refused.stderr) == (1, True)
    assert "no model 'dmeo'" in several.melld("load", "dmeo").stderr


NAMES = ("demo", "other", "third")


@pytest.fixture(scope="module")
def scarce(
    several: DaemonProcess, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """Three models on one CPU device, of which two fit, with little memory for KV; each was loaded once."""
    each_bytes = tenants(several)["demo"]["resident_bytes"]
    directory = tmp_path_factory.mktemp("scarce")
    for seed, name in enumerate(NAMES[1:], 1):
        make_small_model(directory / name, seed=seed)
    config = directory / "melld.toml"
    config.write_text(f"""
        models = [{{path = "{demo_model}", name = "demo"}}, "{directory}/other", "{directory}/third"]
        [devices]
        cpu = {{count = 1, memory_bytes = {2 * each_bytes + (32 << 20)}}}
    """)
    with DaemonProcess(None, "--config", str(config), harmable=True) as process:
        process.wait_ready()
        for words in (("load", "third"), ("load", "other"), ("unload", "third"), ("load", "demo")):
            assert process.melld(*words).returncode == 0
        yield process


def loaded(daemon: DaemonProcess) -> set[str]:
    return {one["model"] for one in daemon.status()["served"] if one["state"] == "loaded"}


def tenants(daemon: DaemonProcess) -> dict[str, Any]:
    return {one["model"]: one for one in daemon.status()["devices"][0]["models"]}


def test_a_model_that_does_not_fit_displaces_an_idle_one(scarce: DaemonProcess) -> None:
    """Nothing that runs is cut for it."""
    assert loaded(scarce) == {"demo", "other"}
    long = {**GREEDY, "max_tokens": 80, "ignore_eos": True, "model": "demo"}
    expected = Stream(scarce, long).result()
    with slowed(scarce.faults):
        running = Stream(scarce, long)
        running.wait_chunks(5)
        assert text_of(scarce, "third")
    assert loaded(scarce) == {"demo", "third"}
    assert running.result() == expected


def long_words(daemon: DaemonProcess) -> str:
    """Return a quarter of a crowd's words; a crowd needs three fifths of the KV memory that workers' weights leave."""
    (device,) = daemon.status()["devices"]
    kv_bytes = device["free_bytes"] + sum(one["granted_bytes"] for one in device["models"])
    return "block " * (kv_bytes * 3 // 5 // TOKEN_BYTES // 4)


def crowd(daemon: DaemonProcess, model: str, words: str) -> list[Stream]:
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "model": model}
    return [Stream(daemon, body | {"prompt": f"{number} {words}"}) for number in range(4)]


def test_kv_memory_goes_from_an_idle_model_to_a_starved_one(scarce: DaemonProcess) -> None:
    """Both answer as when alone, while memory goes to and fro."""
    assert loaded(scarce) == {"demo", "third"}
    words = long_words(scarce)
    quiet = {}
    for name in ("demo", "third"):
        quiet[name] = [stream.result() for stream in crowd(scarce, name, words)]
    for _ in range(2):
        streams = {name: crowd(scarce, name, words) for name in ("demo", "third")}
        assert {name: [stream.result() for stream in each] for name, each in streams.items()} == quiet
    metrics = scarce.get("/metrics")
    takes = [float(line.split()[1]) for line in metrics.splitlines() if line.startswith("melld_kv_takes_total{")]
    assert sum(takes) > 0


@pytest.mark.long
def test_a_killed_model_s_memory_is_free_again(scarce: DaemonProcess) -> None:
    """Its stream goes on once it is reloaded; every byte is somebody's or free, and none is extra."""
    long = {**GREEDY, "model": "third"}
    expected = Stream(scarce, long).result()
    with slowed(scarce.faults):
        stream = Stream(scarce, long)
        stream.wait_chunks(20)
        (pid,) = [one["pid"] for one in scarce.status()["workers"] if one["model"] == "third"]
        os.kill(pid, signal.SIGKILL)
    assert stream.result() == expected
    Operator(scarce).wait_idle()
    (device,) = scarce.status()["devices"]
    granted = sum(one["granted_bytes"] for one in device["models"])
    held = granted + sum(one["resident_bytes"] for one in device["models"]) + device["free_bytes"]
    granule = 2 << 20
    assert device["memory_bytes"] - 2 * granule <= held <= device["memory_bytes"]
    assert device["arena_bytes"] <= granted + granule
    assert all(one["used_bytes"] == 0 for one in device["models"])


def test_a_failing_landlord_costs_no_stream(several: DaemonProcess) -> None:
    """A bug there, in the midst of its work, is logged; memory is divided again a moment later."""
    long = {**GREEDY, "max_tokens": 60}
    quiet = Stream(several, long).result()
    with slowed(several.faults):
        stream = Stream(several, long)
        stream.wait_chunks(10)
        fail(several, "landlord")
    assert stream.result() == quiet
    assert text_of(several, "other")
