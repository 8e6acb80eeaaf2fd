"""Workers that die, hang, slow down or run out of memory while they compute: no client loses a token."""

import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.faults.checker import Subject
from tests.faults.conftest import SILENCE_S
from tests.faults.reader import Reader
from tests.patience import PATIENCE_S
from tests.worker_faults import slowed


def body(tokens: int = 100, prompt: int = 400, seed: int | None = None) -> dict[str, Any]:
    """Return one prompt; greedy, or sampled with a seed."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    words = [5 + number * 7 % 200 for number in range(prompt)]
    return {"prompt": words, "max_tokens": tokens, "ignore_eos": True, **drawn}


@pytest.fixture(autouse=True)
def _in_order(subject: Subject) -> Iterator[None]:
    """Each test begins with healthy workers, and leaves them so."""
    assert subject.judge_quiet() == []
    yield
    assert subject.judge_quiet() == []


def two_on(subject: Subject, *bodies: dict[str, Any]) -> list[Reader]:
    """Return streams that have begun; with two workers under most-free the first two are on different ones."""
    readers = []
    for one in bodies:
        readers.append(subject.read(one))
        readers[-1].wait_chunks(3)
    return readers


@pytest.mark.long
def test_a_worker_killed_in_its_prefill_goes_unnoticed(subject: Subject) -> None:
    """The client whose prompt was being computed waits a moment longer, and knows of nothing."""
    long = body(40, prompt=3000)
    beside = body(seed=3)
    subject.unharmed(long)
    subject.unharmed(beside)
    with slowed(subject.faults):
        readers = two_on(subject, beside)
        [free] = {"w0", "w1"} - {subject.worker_of(readers[0])}
        before = subject.worker(free)["restarts"]
        (subject.faults / f"{free}.step.KILL").touch()  # after the first of the six steps of its prefill
        readers.append(subject.read(long | {"cache_salt": "again"}))
        subject.until(lambda _: not (subject.faults / f"{free}.step.KILL").exists())
    assert subject.judge(readers) == []
    assert readers[-1].status == 200
    assert subject.worker(free)["restarts"] == before + 1


def test_a_hung_worker_is_ejected_and_a_slow_one_is_not(subject: Subject) -> None:
    """SIGSTOP for good is death after `ping_timeout_s`; a worker at a tenth of its speed goes on."""
    bodies = [body(seed=1), body(seed=2)]
    for one in bodies:
        subject.unharmed(one)
    with slowed(subject.faults):
        hung, slow = two_on(subject, *bodies)
        homes = [subject.worker_of(reader) for reader in (hung, slow)]
        assert homes[0] != homes[1]
        before = {name: subject.worker(name) for name in homes}
        over = threading.Event()
        crawl = threading.Thread(target=slow_down, args=(before[homes[1]]["pid"], over))
        crawl.start()
        os.kill(before[homes[0]]["pid"], signal.SIGSTOP)
    try:
        hung.wait_end()
        at_work = subject.worker(homes[1])
    finally:
        over.set()
        crawl.join()
    assert subject.judge([hung, slow]) == []
    assert hung.longest_gap_s > SILENCE_S / 2
    after = {name: subject.worker(name) for name in homes}
    assert after[homes[0]]["pid"] != before[homes[0]]["pid"]
    assert at_work["pid"] == after[homes[1]]["pid"] == before[homes[1]]["pid"]


def slow_down(pid: int, over: threading.Event) -> None:
    """Give a process the processor for a tenth of the time."""
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        over.wait(0.18)
        os.kill(pid, signal.SIGCONT)
        over.wait(0.02)
    os.kill(pid, signal.SIGCONT)


def test_only_the_worker_that_runs_out_of_memory_is_lost(subject: Subject) -> None:
    """One worker's allocator fails: it restarts, its requests go on elsewhere, the others feel nothing."""
    bodies = [body(seed=number) for number in range(4)]
    new = [body(5, prompt=900 + number) | {"cache_salt": "again"} for number in range(4)]
    for one in bodies + new:
        subject.unharmed(one)
    with slowed(subject.faults):
        readers = two_on(subject, *bodies)
        name = subject.worker_of(readers[0])
        before = {worker["worker"]: worker for worker in subject.status()["workers"]}
        resource.prlimit(before[name]["pid"], resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        readers += [subject.read(one) for one in new]  # what runs has all that it needs; a new prompt needs more
        # Told by the worker itself, an exception of the allocator's user, and not only by the signal that ended it.
        gone = subject.until(lambda status: any("Error: " in (worker["reason"] or "") for worker in status["workers"]))
    [reason] = [worker["reason"] for worker in gone["workers"] if worker["reason"]]
    assert "restarts in 1 s" in reason
    assert subject.judge(readers) == []
    for worker in subject.status()["workers"]:
        lost = worker["worker"] == name
        assert worker["restarts"] == before[worker["worker"]]["restarts"] + lost
        assert (worker["pid"] != before[worker["worker"]]["pid"]) == lost


@pytest.mark.long  # its short form: `test_failover`, one request
def test_a_dead_worker_s_request_waits_if_there_is_no_room_elsewhere(subject: Subject) -> None:
    """Both die: whoever had begun waits until a worker is back, however long that takes, and is not refused."""
    bodies = [body(seed=number) for number in range(4)]
    for one in bodies:
        subject.unharmed(one)
    with slowed(subject.faults):
        readers = two_on(subject, *bodies)
        for worker in subject.status()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
    queued = subject.until(lambda status: status["queued_requests"] or not status["requests"])
    assert queued["queued_requests"], "they were never without a worker"
    assert subject.judge(readers) == []


def test_a_killed_template_harms_no_worker(subject: Subject) -> None:
    """The kernel ends workers with the daemon, not with what forked them; the next ones come from a new template."""
    bodies = [body(seed=1), body(seed=2)]
    for one in bodies:
        subject.unharmed(one)
    with slowed(subject.faults):
        readers = two_on(subject, *bodies)
        before = subject.status()["workers"]
        [template] = {parent(worker["pid"]) for worker in before}
        os.kill(template, signal.SIGKILL)
        subject.daemon.wait_for("the template process ended by SIGKILL (from outside); its workers keep running")
    assert subject.judge(readers) == []
    assert [worker["pid"] for worker in subject.status()["workers"]] == [worker["pid"] for worker in before]
    os.kill(before[0]["pid"], signal.SIGKILL)
    subject.until(lambda _: subject.worker(before[0]["worker"])["restarts"] > before[0]["restarts"])
    assert subject.judge_quiet() == []
    assert parent(subject.worker(before[0]["worker"])["pid"]) not in (template, parent(before[1]["pid"]))


def parent(pid: int) -> int:
    """Return who forked it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_running_out_of_file_descriptors_makes_newcomers_wait(subject: Subject) -> None:
    """Streams go on and newcomers wait; then all is as before."""
    subject.unharmed(body())
    subject.unharmed(body(20))
    pid = subject.daemon.process.pid
    place = urlsplit(subject.daemon.url)
    with slowed(subject.faults):
        running = two_on(subject, body())
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert limit[0] >= min(limit[1], 65_536), "the daemon takes what it may have"
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 8, limit[1]))
        try:
            idle = [socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) for _ in range(30)]
            newcomer = subject.read(body(20))
            running[0].wait_chunks(40)
            assert newcomer.status == 0, "there was a descriptor for it"
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    assert subject.judge([*running, newcomer]) == []
    for one in idle:
        one.close()
    assert subject.operator.status()["state"] == "ready"
