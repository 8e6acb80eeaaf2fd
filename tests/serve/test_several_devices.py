"""Devices that several models share, lent and handed over: each model's streams go on, and each answers afterwards."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.forked import nursery
from tests.migrate.live import Answer, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.serve.test_drain import borrowing
from tests.serve.test_renewal import TOKENS, assert_answered, body, end, wait_until
from tests.small_model import make_small_model
from tests.worker_faults import slowed

pytestmark = pytest.mark.long  # its short forms: loans in `test_drain`, renewals in `test_renewal`, with one model
NAMES = ("demo", "other")
SLOW_S = 0.5
"""So much longer is each step: the streams last longer than a loan or a renewal takes to begin."""


def configured(demo_model: Path, directory: Path, devices: int) -> Path:
    """The configuration of two models, of which any device can hold both."""
    make_small_model(directory / "other", seed=1)
    path = directory / "melld.toml"
    path.write_text(f"""
        models = [{{path = "{demo_model}", name = "demo"}}, "{directory}/other"]
        [devices]
        cpu = {{count = {devices}, memory_bytes = "1GiB"}}
    """)
    return path


def streams_of(daemon: DaemonProcess, tokens: int = TOKENS) -> dict[str, Stream]:
    return {name: Stream(daemon, {**body(tokens), "model": name}) for name in NAMES}


def answers_of(streams: dict[str, Stream]) -> dict[str, Answer]:
    return {name: stream.result() for name, stream in streams.items()}


def begun(status: Any) -> bool:
    """Both models' requests have tokens."""
    return {one["model"] for one in status["requests"] if one["output_tokens"]} == set(NAMES)


@pytest.fixture(scope="module")
def pair(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon of two devices, and its configuration."""
    path = configured(demo_model, tmp_path_factory.mktemp("several"), 2)
    nursery()
    with DaemonProcess(None, "--config", str(path), harmable=True) as daemon:
        daemon.wait_ready()
        yield daemon, path
        pid = daemon.status()["pid"]
        if pid != daemon.process.pid:
            end(pid)


def test_a_model_that_is_not_there_harms_nothing(pair: tuple[DaemonProcess, Path]) -> None:
    """Of the new configuration; the old daemon serves both models as before."""
    daemon, path = pair
    good, pid = path.read_text(), daemon.status()["pid"]
    path.write_text(good.replace("/other", "/gone"))
    streams = streams_of(daemon)
    done = daemon.melld("renew")
    path.write_text(good)
    assert (done.returncode, "gone" in done.stderr) == (1, True)
    assert all(answer.error is None for answer in answers_of(streams).values())
    assert daemon.status()["pid"] == pid


def test_a_device_is_lent_and_breaks_no_stream_of_either_model(pair: tuple[DaemonProcess, Path]) -> None:
    """Both models run on one device, named for the loan: the other loads them, and their requests move there."""
    daemon, _ = pair
    whole, operator = answers_of(streams_of(daemon)), Operator(daemon)
    with slowed(daemon.faults, SLOW_S):
        streams = streams_of(daemon)
        operator.wait(begun, PATIENCE_S)
        requests = [one["request"] for one in operator.status()["requests"]]
        workers = {one["worker"]: one["device"] for one in operator.status()["workers"]}
        device = workers[operator.status()["requests"][0]["worker"]]
        program = "sh", "-c", "echo $MELLD_DEVICES; exec cat"
        with borrowing(daemon, "--device", device, "--", *program) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == f"{device}\n"
            lent = {one["worker"] for one in operator.status()["workers"] if one["state"] == "lent"}
            assert lent == {worker for worker, its in workers.items() if its == device}
            for request in requests:
                assert "its worker's device is being lent to `sh`" in daemon.melld("why", request).stdout
            assert all(answer.error is None for answer in answers_of(streams_of(daemon, 5)).values())
    assert answers_of(streams) == whole
    operator.wait(lambda status: not any(one["loan"] for one in status["workers"]), PATIENCE_S)


def test_streams_of_both_models_outlive_a_renewal(pair: tuple[DaemonProcess, Path]) -> None:
    """As do the stories of their requests; both models answer before the old daemon has ended."""
    daemon, _ = pair
    whole, old = answers_of(streams_of(daemon)), daemon.status()["pid"]
    with slowed(daemon.faults, SLOW_S):
        streams = streams_of(daemon)
        Operator(daemon).wait(begun, PATIENCE_S)
        stories = [one["request"] for one in daemon.status()["requests"]]
        done = daemon.melld("renew")
        assert done.returncode == 0, done.stderr
        assert f"has taken over from pid {old}" in daemon.status()["renewal"]
        assert all(answer.error is None for answer in answers_of(streams_of(daemon, 5)).values())
        assert all(stream.is_alive() for stream in streams.values())
    assert answers_of(streams) == whole
    wait_until(lambda: not daemon.status()["renewal"])
    assert answers_of(streams_of(daemon)) == whole
    assert all("finished" in daemon.melld("why", story).stdout for story in stories)


def test_where_no_device_can_be_spared_requests_of_both_models_wait_at_the_socket(
    demo_model: Path, tmp_path: Path
) -> None:
    """They are answered by the new daemon, which has the memory that the old one had."""
    path = configured(demo_model, tmp_path, 1)
    path.write_text(path.read_text().replace(', memory_bytes = "1GiB"', ""))
    nursery()
    with DaemonProcess(None, "--config", str(path), harmable=True) as daemon:
        daemon.wait_ready()
        whole, memory_bytes = answers_of(streams_of(daemon)), daemon.status()["devices"][0]["memory_bytes"]
        operator, idle = Operator(daemon), socket.create_connection(("127.0.0.1", urlsplit(daemon.url).port or 0))
        with ThreadPoolExecutor() as pool:
            with slowed(daemon.faults, SLOW_S):
                streams = streams_of(daemon)
                operator.wait(begun, PATIENCE_S)
                asked = pool.submit(daemon.melld, "renew")
                operator.wait(lambda status: "new requests wait until 2 calls end" in status["renewal"], PATIENCE_S)
            done = asked.result()
        assert done.returncode == 0, done.stderr
        assert "new requests wait until 2" in done.stdout
        assert_answered(idle)
        assert answers_of(streams) == whole
        assert answers_of(streams_of(daemon)) == whole
        status = daemon.status()
        assert status["pid"] != daemon.process.pid
        assert status["devices"][0]["memory_bytes"] == memory_bytes
        end(status["pid"])
