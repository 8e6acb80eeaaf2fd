"""Idle workers end, and come back on demand: on a real daemon with two CPU workers."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.migrate.live import GREEDY, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.serve.test_serve import is_gone
from tests.worker_faults import slowed

WAKES = re.compile(r"wakes in about (\S+) s")
SHORT = {**GREEDY, "max_tokens": 8}


class Sleeper:
    """A daemon whose workers fall asleep at once, and end a moment later."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.operator = Operator(daemon)

    def wait(self, holds: Callable[[dict[str, Any]], bool], deadline_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until this holds; return the workers by name."""

        def all_of(status: Any) -> dict[str, Any]:
            return {worker["worker"]: worker for worker in status["workers"]}

        self.operator.wait(lambda status: holds(all_of(status)), deadline_s)
        return all_of(self.operator.status())

    def wait_all(self, state: str) -> dict[str, Any]:
        """Wait until every worker is in this state."""
        return self.wait(lambda workers: all(worker["state"] == state for worker in workers.values()))


@pytest.fixture(scope="module")
def sleeper(demo_model: Path) -> Iterator[Sleeper]:
    """The daemon packs: a second worker is woken only when the first is full."""
    flags = ("--set", "idle.sleep_after_s=0.5", "--set", "idle.stop_after_s=0.5")
    flags += ("--set", 'scheduler.policy="best-fit"')
    with DaemonProcess(demo_model, "--device", "cpu:2", *flags, harmable=True) as process:
        yield Sleeper(process.wait_ready())


def test_idle_workers_end_and_one_returns_for_a_request(sleeper: Sleeper) -> None:
    """An idle GPU's memory and power are free, and the next client gets an answer, not a refusal."""
    pids = [worker["pid"] for worker in sleeper.operator.status()["workers"]]
    stopped = sleeper.wait_all("stopped")
    assert [worker["pid"] for worker in stopped.values()] == [None, None]
    assert all(is_gone(pid) for pid in pids if pid)
    assert all(WAKES.search(worker["why"]) for worker in stopped.values())
    answer = Stream(sleeper.daemon, SHORT).result()
    assert answer.error is None
    assert answer.usage["completion_tokens"] == 8
    restarts = [worker["restarts"] for worker in sleeper.operator.status()["workers"]]
    assert restarts == [0, 0], "a wake on purpose is no failure"


def test_a_request_that_comes_as_the_last_worker_ends_is_answered(sleeper: Sleeper) -> None:
    """Sleep races with arrivals: one that comes in between waits for the wake."""
    Stream(sleeper.daemon, SHORT).result()
    sleeper.wait(lambda workers: all(worker["state"] in ("stopping", "stopped") for worker in workers.values()))
    answers = [Stream(sleeper.daemon, SHORT) for _ in range(4)]
    results = [stream.result() for stream in answers]
    assert [result.error for result in results] == [None] * 4
    assert len({result.choices[0].text for result in results}) == 1


def test_a_worker_that_dies_while_waking_costs_its_requests_nothing(sleeper: Sleeper) -> None:
    """The request goes to another worker, and the dead one is restarted."""
    unharmed = Stream(sleeper.daemon, SHORT).result()
    sleeper.wait_all("stopped")
    faults = [sleeper.daemon.faults / f"{worker}.starting.STOP" for worker in ("w0", "w1")]
    for fault in faults:
        fault.touch()  # who wakes waits to be killed
    stream = Stream(sleeper.daemon, SHORT)
    waking = sleeper.wait(lambda workers: any(w["state"] == "waking" and w["pid"] for w in workers.values()))
    [victim] = [worker for worker in waking.values() if worker["state"] == "waking"]
    for fault in faults:
        fault.unlink(missing_ok=True)
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.result() == unharmed
    sleeper.wait(lambda workers: workers[victim["worker"]]["restarts"] == 1)


def test_a_sleeping_worker_wakes_from_a_new_template(sleeper: Sleeper) -> None:
    """Whatever kills the template: awake workers go on, and sleeping ones wake."""
    with slowed(sleeper.daemon.faults):
        stream = Stream(sleeper.daemon, {**GREEDY, "max_tokens": 100})
        stream.wait_chunks(5)
        [worker] = [w for w in sleeper.operator.status()["workers"] if w["running_requests"]]
        parent = int(Path(f"/proc/{worker['pid']}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != sleeper.daemon.process.pid
        os.kill(parent, signal.SIGKILL)
        sleeper.wait(lambda _: is_gone(parent))
    answer = stream.result()
    assert answer.error is None
    assert answer.usage["completion_tokens"] == 100
    sleeper.wait_all("stopped")
    assert Stream(sleeper.daemon, SHORT).result().error is None
