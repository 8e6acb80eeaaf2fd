"""One daemon, several models: each is served as it would be alone, and none harms another."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import COMPLETIONS, Answered, request
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model
from tests.worker_faults import slowed

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
            {{path = "{demo_model}", name = "demo"}},
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


def test_each_model_answers_as_it_would_alone(several: DaemonProcess, daemon: DaemonProcess) -> None:
    """The name decides; another of its names is the same model, and no name means the first."""
    demo, other = text_of(several, "demo"), text_of(several, "other")
    assert demo == text_of(daemon, "demo")
    assert other != demo
    assert text_of(several, "gpt-4o") == other
    assert asked(several).json()["model"] == "demo"


def test_an_unknown_name_is_told_which_there_are(several: DaemonProcess) -> None:
    """A typing error is mended by reading the answer."""
    answered = asked(several, model="dmeo")
    error = answered.json()["error"]
    assert (answered.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "demo, other, gpt-4o, damaged" in error["message"]
    assert asked(several, model=3).status == 400


def test_a_model_that_cannot_be_loaded_harms_no_other(several: DaemonProcess) -> None:
    """Its callers hear why; operators see it in the list; the others are served."""
    answered = asked(several, model="damaged")
    assert answered.status == 503
    assert "damaged could not be loaded: worker w2 on cpu:0 could not start" in answered.json()["error"]["message"]
    assert int(answered.headers["retry-after"]) >= 1
    states = {card["id"]: card["status"] for card in json.loads(several.get("/v1/models"))["data"]}
    assert states.keys() == {"demo", "other", "gpt-4o", "damaged"}
    assert states["damaged"] == "failed"
    listed = several.melld("models")
    assert listed.returncode == 0
    assert any(
        "damaged" in line and "failed" in line and "could not start" in line for line in listed.stdout.splitlines()
    )
    assert json.loads(several.get("/ready"))["status"] == "ready"


def test_an_idle_model_is_unloaded_and_comes_back_with_the_same_answer(several: DaemonProcess) -> None:
    """Its memory is free while nobody asks it; whoever asks next waits for its load alone."""
    before = text_of(several, "other")
    Operator(several).wait(lambda status: status["served"][1]["state"] == "unloaded", 60.0)
    assert text_of(several, "demo")
    assert text_of(several, "other") == before


def test_a_death_concerns_one_model(several: DaemonProcess) -> None:
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
    """Of vLLM's metrics and melld's alike."""
    for name in ("demo", "other"):
        text_of(several, name)
    lines = several.get("/metrics").splitlines()
    for metric, label in (("vllm:request_success_total", "model_name"), ("melld_requests_judged_total", "model")):
        of_models = {
            name for name in ("demo", "other") for line in lines if metric in line and f'{label}="{name}"' in line
        }
        assert of_models == {"demo", "other"}, metric
    assert {one["model"] for one in several.status()["workers"]} == {"demo", "other", "damaged"}
