"""A bug in one of the daemon's own tasks: no stream ends for it, and the task is restarted."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_faults import TASKS
from tests.migrate.chaos import History
from tests.migrate.live import GREEDY, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

SLOW_S = 0.2
"""By so much each running request makes a step longer."""


@pytest.fixture(scope="module")
def harmed(demo_model: Path) -> Iterator[DaemonProcess]:
    """A daemon whose tasks fail on demand, the first of them as it starts."""
    flags = ("--device", "cpu:2", "--kv-bytes", "64MiB", "--set", "idle.sleep_after_s=inf")
    with DaemonProcess(demo_model, *flags, harmable=True) as process:
        (process.faults / "token texts.RAISE").touch()
        process.wait_ready()
        Operator(process).wait_linked(process)
        assert reached(process.faults / "token texts.RAISE")
        yield process


def restarts(daemon: DaemonProcess) -> dict[str, float]:
    """Return how often each task was restarted, by the metrics."""
    found = re.findall(r'^melld_task_restarts_total\{task="(.*)"\} (.*)$', daemon.get("/metrics"), re.MULTILINE)
    return {task: float(count) for task, count in found}


def wait_restarts(daemon: DaemonProcess, task: str, count: float) -> None:
    """Wait until the task was restarted so often."""
    end_s = time.monotonic() + PATIENCE_S
    while restarts(daemon)[task] != count:
        assert time.monotonic() < end_s, f"{task} was not started again"
        time.sleep(0.1)  # another process: asking it is the only way to know


def poke(daemon: DaemonProcess, task: str) -> None:
    """Give a waiting task something to do."""
    if task == "reload":
        daemon.process.send_signal(signal.SIGHUP)
    if task == "failures":
        (daemon.faults / "failures.POKE").touch()


def reached(file: Path) -> bool:
    """Wait until the task has reached its point, within its time."""
    end_s = time.monotonic() + PATIENCE_S
    while file.exists() and time.monotonic() < end_s:
        time.sleep(0.02)  # another process takes it away: there is nothing to wait on
    return not file.exists()


def fail(daemon: DaemonProcess, task: str) -> None:
    """Make the task fail, see it reported, and see it reach the same point again."""
    before = restarts(daemon)
    for fault in ("RAISE", "PASS"):
        file = daemon.faults / f"{task}.{fault}"
        file.touch()
        poke(daemon, task)
        assert reached(file), f"{task}: {fault}"
        if fault == "RAISE":
            Operator(daemon).wait(lambda status: any(f"'{task}' failed" in one for one in status["warnings"]))
            wait_restarts(daemon, task, before[task] + 1)
    assert restarts(daemon) == before | {task: before[task] + 1}


def test_a_failing_task_is_restarted_and_costs_no_stream(harmed: DaemonProcess, tmp_path: Path) -> None:
    """Each in turn, in the midst of its work, under load with moves: every answer is that of a quiet daemon."""
    history = History(harmed, tmp_path, seed=3, harm_every_s=1.0, bodies=6)
    history.spared = frozenset({"w0", "w1"})
    history.move_every_s = 0.3
    history.play(requests=0, clients=0)  # takes the undisturbed answers
    over = threading.Event()

    def load() -> None:
        while not over.is_set() or (history.tally["exact"] <= len(TASKS) and not history.wrong):
            history.play(requests=4, clients=2)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        wait_restarts(harmed, "token texts", 1)
        assert restarts(harmed) == dict.fromkeys((*TASKS, "outputs"), 0.0) | {"token texts": 1.0}
        with slowed(harmed.faults, SLOW_S):  # the streams of a few calls last as long as the tasks take
            for task in TASKS:
                fail(harmed, task)
        ready = json.loads(harmed.get("/ready"))
        assert ready["status"] == "ready"
        assert set(TASKS) <= set(ready["reason"].partition(": ")[2].partition(": ")[2].split(", "))
    finally:
        over.set()
        loading.join()
    assert history.wrong == []
    assert history.tally["exact"] > len(TASKS)
    assert history.tally["move committed"] > 0


def test_the_output_reading_loop_is_rebuilt(harmed: DaemonProcess) -> None:
    """vLLM passes its error to the calls in flight and stops for good; the daemon goes on and serves the next."""
    quiet = Stream(harmed, GREEDY).result()
    cut = Stream(harmed, GREEDY | {"max_tokens": 400})
    cut.wait_chunks(5)
    (harmed.faults / "outputs.RAISE").touch()
    assert cut.result().error is not None
    assert Stream(harmed, GREEDY).result() == quiet
    assert restarts(harmed)["outputs"] == 1
    Operator(harmed).wait_idle()
