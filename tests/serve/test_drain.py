"""`melld drain` and `melld resume` on a real daemon under load: no stream is broken, and the device is free."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.cli import main
from melld.control.client import ControlClient
from melld.control.messages import Drain
from tests.migrate.live import Answer, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

STREAMS = 8
BODY = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
SLOW_S = 0.02
"""By so much each running request makes a step longer: few tokens last as long as many."""


@pytest.fixture(scope="module")
def daemon(demo_model: Path) -> Iterator[DaemonProcess]:
    """Two workers, a policy that never moves requests, and a decision log that cannot be written."""
    flags = ["--device", "cpu:2", "--kv-bytes", "16MiB", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", 'scheduler.decision_log="/dev/full"']
    with DaemonProcess(demo_model, *flags, harmable=True) as process:
        yield process.wait_ready()


@pytest.fixture
def operator(daemon: DaemonProcess) -> Iterator[Operator]:
    operator = Operator(daemon)
    yield operator
    operator.resume("w0")
    operator.resume("w1")
    operator.wait_ready()
    operator.wait_idle()


def body(number: int) -> dict[str, Any]:
    """Return a request that shares no block with the others."""
    return {**BODY, "prompt": list(range(5 + number, 45 + number)), "cache_salt": str(number)}


@pytest.fixture(scope="module")
def unmoved(daemon: DaemonProcess) -> list[Answer]:
    """The undisturbed answers."""
    return [stream.result() for stream in [Stream(daemon, body(number)) for number in range(STREAMS)]]


def begun(daemon: DaemonProcess, count: int) -> list[Stream]:
    """Return so many streams, all of which have begun."""
    streams = [Stream(daemon, body(number)) for number in range(count)]
    for stream in streams:
        stream.wait_chunks(3)
    return streams


def state_of(operator: Operator, worker: str) -> Any:
    return next(one for one in operator.status()["workers"] if one["worker"] == worker)


def test_a_drain_under_load_breaks_no_stream(daemon: DaemonProcess, operator: Operator, unmoved: list[Answer]) -> None:
    """Every answer is unchanged, and the worker has no process when the command returns."""
    with slowed(daemon.faults, SLOW_S):
        streams = begun(daemon, STREAMS)
        here = sum(one["worker"] == "w1" for one in operator.status()["requests"])
        pid = state_of(operator, "w1")["pid"]
        done = daemon.melld("drain", "w1", "--wait", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["outcome"], report["left"], report["restarted"]) == (0, "drained", 0, 0)
    assert here >= STREAMS // 4
    assert report["moved"] >= 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    worker = state_of(operator, "w1")
    assert (worker["state"], worker["pid"], worker["used_blocks"]) == ("drained", None, 0)
    assert worker["why"] == "drained: `melld resume w1` starts it"
    assert (worker["reason"], worker["tokens_per_s"], worker["memory_bytes"]) == ("", 0, None), "nothing is wrong"
    assert [stream.result() for stream in streams] == unmoved


def melld_run(daemon: DaemonProcess, *words: str) -> list[str]:
    return [sys.executable, "-m", "melld", "run", "--runtime-directory", str(daemon.runtime_directory), *words]


@contextlib.contextmanager
def borrowing(daemon: DaemonProcess, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a `melld run`, which is killed at the latest at the end of the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(melld_run(daemon, *words), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_device_is_lent_under_load_and_breaks_no_stream(
    daemon: DaemonProcess, operator: Operator, unmoved: list[Answer]
) -> None:
    """`melld run`: the program starts on a device without a process, all can see whose it is, and it comes back."""
    program = "--device", "cpu:1", "--", "sh", "-c", "echo $MELLD_DEVICES; exec cat"
    with slowed(daemon.faults, SLOW_S):
        streams = begun(daemon, STREAMS)
        there = [one["request"] for one in operator.status()["requests"] if one["worker"] == "w1"]
        with borrowing(daemon, *program) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "cpu:1\n"
            worker = state_of(operator, "w1")
            assert (worker["state"], worker["pid"], worker["loan"]["pid"]) == ("lent", None, running.pid)
            lent = f"lent to `sh` (pid {running.pid}, "
            assert worker["why"].startswith(lent)
            assert f"its worker's device is being {lent}" in daemon.melld("why", there[0]).stdout
            assert lent in daemon.melld("resume", "w1").stderr
            refused = subprocess.run(melld_run(daemon, "--", "true"), stderr=subprocess.PIPE, text=True, check=False)
            assert lent in refused.stderr
            assert "without w0 no worker would be left in service" in refused.stderr
    operator.wait(lambda _: state_of(operator, "w1")["loan"] is None)
    assert [stream.result() for stream in streams] == unmoved
    metrics = daemon.get("/metrics")
    assert re.search(r"^melld_loans_total{.*} 1.0$", metrics, re.MULTILINE)
    assert re.search(r"^melld_lent_seconds_total{.*} [0-9.]+$", metrics, re.MULTILINE)


def test_the_last_worker_is_not_drained(daemon: DaemonProcess, operator: Operator) -> None:
    """An operator's slip must not end the service; the refusal gives the reason."""
    assert daemon.melld("drain", "w0", "--wait").returncode == 0
    refused = daemon.melld("drain", "w1")
    assert refused.returncode == 1
    assert "w1 is the last worker in service (w0: drained)" in refused.stderr
    assert state_of(operator, "w1")["state"] != "draining"
    assert Stream(daemon, body(1)).result().error is None


def kv_memories(pid: int) -> int:
    """Return how many workers' KV memories that process maps."""
    maps = Path("/proc", str(pid), "maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "/memfd:melld-kv" in line})


def test_no_process_keeps_a_drained_worker_s_memory(daemon: DaemonProcess, operator: Operator) -> None:
    """The device is wanted for something else: what a sibling still maps of it would not be free."""
    pid = state_of(operator, "w0")["pid"]
    operator.wait(lambda _: kv_memories(pid) == 2)
    assert daemon.melld("drain", "w1", "--wait").returncode == 0
    operator.wait(lambda _: kv_memories(pid) == 1)
    assert daemon.melld("resume", "w1").returncode == 0
    operator.wait(lambda _: kv_memories(pid) == 2)


def test_a_resumed_worker_serves_again(daemon: DaemonProcess, operator: Operator) -> None:
    """The device was wanted for an hour, not forever."""
    assert daemon.melld("drain", "w0", "--wait").returncode == 0
    resumed = daemon.melld("resume", "w0")
    assert (resumed.returncode, resumed.stdout) == (0, "w0: starting; `melld status` shows when it is ready\n")
    operator.wait_ready()
    assert daemon.melld("resume", "w0").stdout == "w0: was already in service\n"
    assert daemon.melld("drain", "w1", "--wait").returncode == 0
    assert Stream(daemon, body(2)).result().error is None, "w0 alone is there to answer"


def test_a_cancelled_drain_ends_nothing(daemon: DaemonProcess, operator: Operator) -> None:
    """A change of mind costs no client anything, and whoever waits for the drain hears of it."""
    with slowed(daemon.faults, SLOW_S):
        streams = begun(daemon, 4)
        worker = operator.status()["requests"][0]["worker"]
        drain = daemon.melld("drain", worker)
        assert drain.returncode == 0
        assert f"{worker}: drain" in drain.stdout
        assert daemon.melld("resume", worker).returncode == 0
    assert [stream.result().error for stream in streams] == [None] * 4


def test_a_drained_worker_that_dies_stays_away(daemon: DaemonProcess, operator: Operator) -> None:
    """A crash on the way out frees the device; the supervisor does not bring the worker back."""
    with slowed(daemon.faults, SLOW_S):
        streams = begun(daemon, 6)
        worker = operator.status()["requests"][0]["worker"]
        pid = state_of(operator, worker)["pid"]
        os.kill(pid, signal.SIGSTOP)  # so that nothing can leave it
    answers: list[bytes] = []
    client = ControlClient([daemon.runtime_directory])
    asked = Drain(worker=worker, wait=True)
    waiting = threading.Thread(target=lambda: answers.append(client.operate("drain", asked, PATIENCE_S)))
    waiting.start()
    operator.wait(lambda status: any(one["state"] == "draining" for one in status["workers"]))
    os.kill(pid, signal.SIGKILL)
    waiting.join(PATIENCE_S)
    report = json.loads(answers[0])
    assert (report["outcome"], report["left"]) == ("drained", 0)
    assert report["restarted"] > 0
    assert [stream.result().error for stream in streams] == [None] * 6
    assert state_of(operator, worker)["state"] == "drained"


def test_a_worker_that_is_down_is_drained_at_once(daemon: DaemonProcess, operator: Operator) -> None:
    """One that has died is not restarted: its device is wanted."""
    os.kill(state_of(operator, "w1")["pid"], signal.SIGKILL)
    operator.wait(lambda status: any(one["state"] != "ready" for one in status["workers"]))
    done = daemon.melld("drain", "w1", "--wait", "--json")
    assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "drained")
    assert (state_of(operator, "w1")["state"], state_of(operator, "w1")["pid"]) == ("drained", None)
    assert Stream(daemon, body(1)).result().error is None


def test_at_the_deadline_requests_resume_elsewhere_from_their_tokens(
    daemon: DaemonProcess, operator: Operator, unmoved: list[Answer]
) -> None:
    """The device is wanted at a certain time: what could not be moved by then is replayed, and no stream is lost."""
    with slowed(daemon.faults, SLOW_S):
        streams = begun(daemon, 4)
        worker = operator.status()["requests"][0]["worker"]
        done = daemon.melld("drain", worker, "--wait", "--deadline", "0", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["outcome"], report["left"]) == (0, "drained", 0)
    assert report["restarted"] > 0
    assert [stream.result() for stream in streams] == unmoved[:4]


def test_an_impossible_drain_is_reported(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Exit codes tell a refusal from bad usage and from a missing daemon."""
    unknown = daemon.melld("drain", "w9")
    assert (unknown.returncode, "available: w0, w1" in unknown.stderr) == (1, True)
    assert daemon.melld("resume", "w9").returncode == 1
    assert daemon.melld("drain", "w0", "--deadline", "soon").returncode == 2
    for command in ("drain", "resume"):
        assert main([command, "w0", "--runtime-directory", str(tmp_path)]) == 3


def test_the_status_says_why(daemon: DaemonProcess, operator: Operator) -> None:
    """What keeps a GPU awake, and what packing has saved, need not be guessed."""
    with slowed(daemon.faults, SLOW_S):
        [stream] = begun(daemon, 1)
        [one] = operator.requests_of(stream)
        workers = {worker["worker"]: worker for worker in operator.status()["workers"]}
    busy = workers.pop(one["worker"])
    [other] = workers.values()
    assert busy["size_class"] == "T"
    assert re.fullmatch(r"1 request; awake for \d+ s \(\w+\)", busy["why"])
    assert other["size_class"] is None
    assert re.fullmatch(r"idle: sleeps in \d+ s|not needed.*|", other["why"])
    assert stream.result().error is None
    status = operator.status()
    assert status["worker_seconds_awake"] > 0
    assert 0 <= status["gpu_hours_saved"] <= len(status["workers"]) * status["uptime_s"] / 3600
    assert status["service"]["requests"] > 0
    assert 0 <= status["service"]["attainment"] <= status["service"]["ttft_attainment"] <= 1
    metrics = daemon.get("/metrics")
    for name in ("melld_worker_awake_seconds_total{", "melld_requests_attained_total{", "melld_moves_deferred "):
        assert f"\n{name}" in metrics


def test_a_log_on_a_full_disk_is_one_warning(daemon: DaemonProcess, operator: Operator) -> None:
    """All of the above was served although not one decision could be written."""
    warnings = operator.status()["warnings"]
    assert warnings == ["the decision log /dev/full ends here; serving continues: No space left on device"]
