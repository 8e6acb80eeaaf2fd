"""An idle model releases its weights, keeps its process, and soon answers again as before."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import COMPLETIONS, request
from tests.families.family import make_family
from tests.families.poolers import POOLERS
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.serve.test_serve import is_gone
from tests.small_model import HIDDEN, make_small_model

WIDE = 88_000
"""So wide is the hidden layer of a model whose weights take more than all else of its process: 135 MB."""
WEIGHTS_BYTES = 3 * 4 * WIDE * HIDDEN
NOBODYS_BYTES = 2 << 20
"""Of an arena: its first granule."""


def make_wide_model(directory: Path) -> None:
    """Write a wide model that generates."""
    make_small_model(directory, seed=3, intermediate=WIDE)


def make_wide_encoder(directory: Path) -> None:
    """Write a wide model that keeps no KV."""
    bert = POOLERS["bert"]
    fields = {**bert.fields, "num_hidden_layers": 2, "intermediate_size": WIDE}
    make_family(bert._replace(fields=fields), directory)


@contextlib.contextmanager
def beside(demo_model: Path, wide: Path, directory: Path, options: str = "") -> Iterator[DaemonProcess]:
    """A small model, and a wide one that dozes after a second without requests; its configuration is written there."""
    config = directory / "melld.toml"
    config.write_text(f"""
        models = [
            {{path = "{demo_model}", name = "demo", pinned = true}},
            {{path = "{wide}", keep_alive_s = 1, vllm = {{{options}}}}},
        ]
        [devices]
        cpu = {{count = 1, memory_bytes = "1GiB"}}
    """)
    with DaemonProcess(None, "--config", str(config), "--log-level", "info", harmable=True) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dozy")


@pytest.fixture(scope="module")
def wide(directory: Path) -> Path:
    make_wide_model(directory / "wide")
    return directory / "wide"


@pytest.fixture(scope="module")
def dozy(demo_model: Path, wide: Path, directory: Path) -> Iterator[DaemonProcess]:
    with beside(demo_model, wide, directory) as daemon:
        yield daemon


def tenant(daemon: DaemonProcess) -> dict[str, Any]:
    """Return the wide model on its device."""
    (device,) = daemon.status()["devices"]
    (wide,) = [one for one in device["models"] if one["model"] == "wide"]
    return dict(wide)


def worker(daemon: DaemonProcess) -> dict[str, Any]:
    (wide,) = [one for one in daemon.status()["workers"] if one["model"] == "wide"]
    return dict(wide)


def memory_bytes(pid: int) -> int:
    """Return its process's current physical memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def until(daemon: DaemonProcess, state: str) -> dict[str, Any]:
    """Return the wide model on its device, once it has that state."""
    Operator(daemon).wait(lambda _status: tenant(daemon)["state"] == state)
    return tenant(daemon)


def asked(daemon: DaemonProcess) -> Any:
    """Return its answer, with log-probabilities."""
    body = {"model": "wide", "prompt": "The workers of", "max_tokens": 16, "temperature": 0, "logprobs": 2}
    answered = request(daemon.url, "POST", COMPLETIONS, body)
    assert answered.status == 200, answered.body
    return answered.json()["choices"][0]


def test_an_idle_model_dozes_and_answers_as_before(dozy: DaemonProcess) -> None:
    """Most of its memory is free meanwhile; its process stays, and is back sooner than a new one."""
    before, there, process = asked(dozy), tenant(dozy), worker(dozy)
    held_bytes = memory_bytes(process["pid"])
    dozing = until(dozy, "dozing")
    assert dozing["resident_bytes"] < there["resident_bytes"] / 2
    assert dozing["granted_bytes"] == 0
    asleep = worker(dozy)
    assert (asleep["state"], asleep["pid"]) == ("dozing", process["pid"])
    assert "(idle)" in asleep["why"]
    assert memory_bytes(process["pid"]) < held_bytes - WEIGHTS_BYTES * 2 // 3, "its weights are gone from memory"
    states = {card["id"]: card["status"] for card in json.loads(dozy.get("/v1/models"))["data"]}
    assert states["wide"] == "unloaded"
    assert asked(dozy) == before
    assert worker(dozy)["pid"] == process["pid"]
    assert tenant(dozy)["resident_bytes"] == there["resident_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("encodes", [False, True])
def test_a_model_that_embeds_dozes_too(demo_model: Path, wide: Path, tmp_path: Path, encodes: bool) -> None:
    """It makes no tokens, so a vector proves that it is restored."""
    if encodes:
        wide = tmp_path / "wide"
        make_wide_encoder(wide)
    with beside(demo_model, wide, tmp_path, 'runner = "pooling"') as daemon:
        before, process = embedded(daemon), worker(daemon)
        until(daemon, "dozing")
        assert embedded(daemon) == before
        assert worker(daemon)["pid"] == process["pid"]


def embedded(daemon: DaemonProcess) -> Any:
    answered = request(daemon.url, "POST", "/v1/embeddings", {"model": "wide", "input": "a block table"})
    assert answered.status == 200, answered.body
    return answered.json()["data"]


def test_another_model_is_served_beside_one_that_dozes(dozy: DaemonProcess) -> None:
    """And a request that comes as a model is about to doze waits for it to wake."""
    asked(dozy)
    running = Stream(dozy, {**GREEDY, "max_tokens": 60})
    until(dozy, "dozing")
    assert running.result().error is None
    wide = Stream(dozy, {**GREEDY, "model": "wide", "max_tokens": 8})
    assert wide.result().error is None


def test_a_request_that_comes_as_its_model_goes_to_doze_stops_that(dozy: DaemonProcess, directory: Path) -> None:
    """It does not wait for the rest of it: the weights are never let go of, so that no file is missed."""
    before, process = asked(dozy), worker(dozy)
    held = dozy.faults / f"{process['worker']}.dropping.HOLD"
    held.touch()
    until(dozy, "leaving")
    (weights,) = (directory / "wide").glob("*.safetensors")
    away = weights.rename(directory / "away")
    try:
        assert asked(dozy) == before
    finally:
        away.rename(weights)
        held.unlink()
    assert worker(dozy)["pid"] == process["pid"]


@contextlib.contextmanager
def scribbled(daemon: DaemonProcess) -> Iterator[None]:
    """Keep overwriting the ungranted part of its arena, as all engines together might use it."""
    files = []
    for one in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files += [os.open(one, os.O_RDWR)] if "melld-arena" in str(one.readlink()) else []
    (file,) = files
    over = threading.Event()

    def scribble() -> None:
        while not over.wait(0.001):
            os.pwrite(file, os.urandom(NOBODYS_BYTES // 8), NOBODYS_BYTES // 8)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        yield
    finally:
        over.set()
        scribbler.join()
        os.close(file)


@pytest.mark.long
def test_other_engines_trials_end_no_waking_worker(dozy: DaemonProcess) -> None:
    """It makes a token before it has any memory to itself, and must make the same one as when it began to doze."""
    before, process = asked(dozy), worker(dozy)
    with scribbled(dozy):
        until(dozy, "dozing")
        assert asked(dozy) == before
    assert worker(dozy)["pid"] == process["pid"]


def test_a_process_killed_while_dozing_is_replaced(dozy: DaemonProcess) -> None:
    """The next request has the same answer, from a new process."""
    before = asked(dozy)
    until(dozy, "dozing")
    pid = worker(dozy)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(dozy, "stopped")
    assert asked(dozy) == before
    assert worker(dozy)["pid"] != pid


def test_an_operator_can_unload_a_dozing_model(dozy: DaemonProcess) -> None:
    """`melld unload` frees all of its memory."""
    asked(dozy)
    until(dozy, "dozing")
    pid = worker(dozy)["pid"]
    assert dozy.melld("unload", "wide").stdout == "wide: unloaded\n"
    assert tenant(dozy)["resident_bytes"] == 0
    assert is_gone(pid)
