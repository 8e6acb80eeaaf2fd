"""Workers of two ranks each: answers as from one device, moves, and the death of a rank, on a real daemon."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from melld.kvstore.process_meter import with_children
from tests.migrate.live import GREEDY, SEEDED, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.serve.test_serve import is_gone
from tests.worker_faults import slowed

SHORT = {"max_tokens": 40}
"""Where ranks outnumber cores, each waits for the others on a core of its own: a step takes ten milliseconds."""
STEP_S = 0.15
"""By how much a request makes a step longer while something is done to it: so many tokens last for that."""
CASES = {"greedy": GREEDY | SHORT, "seeded": SEEDED | SHORT | {"logprobs": True, "top_logprobs": 3}}
ALL_CASES = CASES | {"long": GREEDY | {"max_tokens": 160}}
SILENCE_S = 3.0
pytestmark = pytest.mark.long


class Group:
    """A daemon of two workers with two CPU devices each."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.operator = Operator(daemon)

    def pid(self, worker: str) -> int:
        """Return the worker's process."""
        (pid,) = [one["pid"] for one in self.operator.status()["workers"] if one["worker"] == worker]
        return int(pid)

    def ranks(self, worker: str) -> list[int]:
        """Return the processes of the worker's ranks."""
        children = with_children(self.pid(worker))[1:]
        return [child for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]

    def worker_of(self, stream: Stream) -> str:
        """Return where the stream's request runs."""
        (request,) = self.operator.requests_of(stream)
        return str(request["worker"])

    def slowed(self) -> contextlib.AbstractContextManager[None]:
        """Within it, nothing completes before it is looked at."""
        return slowed(self.daemon.faults, STEP_S)

    def begun(self, case: str) -> Stream:
        """Return a stream whose first tokens have come."""
        stream = Stream(self.daemon, ALL_CASES[case])
        stream.wait_chunks(8)
        return stream


def computed_s(pid: int) -> float:
    """Return a process's CPU time."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def group(demo_model: Path) -> Iterator[Group]:
    """Both workers, always in use."""
    flags = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    with DaemonProcess(
        demo_model,
        "--device",
        "cpu:4",
        "--set",
        "devices.per_worker=2",
        *flags,
        "--set",
        "migration.checksum=true",
        "--set",
        f"health.ping_timeout_s={SILENCE_S}",
        harmable=True,
    ) as process:
        process.wait_ready()
        group = Group(process)
        group.operator.wait_ready()
        for _ in range(2):
            process.wait_for(" by shared_memory of 2 ranks")
        yield group


def test_ranks_leave_no_memory_behind(group: Group) -> None:
    """Workers that come and go for weeks, or are killed, do not fill /dev/shm: 64 MiB in many containers."""
    maps = [Path(f"/proc/{rank}/maps").read_text() for worker in ("w0", "w1") for rank in group.ranks(worker)]
    shared = [line for text in maps for line in text.splitlines() if "/dev/shm/vllm_dist_" in line]  # noqa: S108
    assert shared or "avx512f" not in Path("/proc/cpuinfo").read_text()  # without it, vLLM's ranks use sockets alone
    assert [line for line in shared if not line.endswith(" (deleted)")] == []


@pytest.fixture(scope="module")
def told(daemon: DaemonProcess) -> dict[str, str]:
    """Return one device's answers."""
    streams = {name: Stream(daemon, body) for name, body in ALL_CASES.items()}
    return {name: stream.result().choices[0].text for name, stream in streams.items()}


def test_two_ranks_answer_as_one_device(group: Group, told: dict[str, str]) -> None:
    """Whoever has two small cards gets the answers of one large one."""
    assert [worker["device"] for worker in group.operator.status()["workers"]] == ["cpu:0+1", "cpu:2+3"]
    assert [len(group.ranks(worker)) for worker in ("w0", "w1")] == [2, 2]
    streams = {name: Stream(group.daemon, body) for name, body in CASES.items()}
    assert {name: stream.result().choices[0].text for name, stream in streams.items()} == {
        name: told[name] for name in CASES
    }


def test_idle_ranks_yield_their_cores(group: Group) -> None:
    """vLLM's own would poll for the next message without a pause, for a second."""
    ranks = [rank for worker in ("w0", "w1") for rank in group.ranks(worker)]
    group.begun("greedy").result()
    began_s, before_s = time.monotonic(), [computed_s(rank) for rank in ranks]
    group.operator.wait(lambda _: time.monotonic() >= began_s + 0.5)
    lasted_s = time.monotonic() - began_s
    assert max(computed_s(rank) - was_s for rank, was_s in zip(ranks, before_s, strict=True)) < 0.25 * lasted_s


@pytest.mark.parametrize("via", ["tokens", "kv"])
@pytest.mark.parametrize("case", CASES)
def test_a_request_moves_between_workers_of_two_ranks(group: Group, told: dict[str, str], case: str, via: str) -> None:
    """Every rank must know the request, have its part of the blocks, and sample with the same generator."""
    with group.slowed():
        stream = group.begun(case)
        assert [report["via"] for report in group.operator.move(stream, via)] == [via]
    answer = stream.result()
    assert (answer.error, answer.choices[0].text) == (None, told[case])


def test_a_worker_of_two_ranks_drains_and_comes_back(group: Group, told: dict[str, str]) -> None:
    """A pair of devices leaves service: nobody is cut, and both are free until they are wanted."""
    with group.slowed():
        stream = group.begun("long")
        worker = group.worker_of(stream)
    processes = [group.pid(worker), *group.ranks(worker)]
    assert group.daemon.melld("drain", worker, "--wait").returncode == 0
    answer = stream.result()
    assert (answer.error, answer.choices[0].text) == (None, told["long"])
    assert [is_gone(process) for process in processes] == [True] * 3
    assert group.daemon.melld("resume", worker).returncode == 0
    group.operator.wait_ready()
    assert len(group.ranks(worker)) == 2


def test_a_rank_s_death_is_its_worker_s_and_its_requests_go_on(group: Group, told: dict[str, str]) -> None:
    """vLLM by itself would notice after seconds, and its clients would lose their answers."""
    with group.slowed():
        streams = {case: group.begun(case) for case in CASES}
        worker = group.worker_of(streams["greedy"])
        pid = group.pid(worker)
        victim, sibling = group.ranks(worker)
        os.kill(victim, signal.SIGKILL)
    group.operator.wait_gone(worker, pid)
    answers = {case: stream.result() for case, stream in streams.items()}
    assert [answer.error for answer in answers.values()] == [None, None]
    assert {case: answer.choices[0].text for case, answer in answers.items()} == {case: told[case] for case in answers}
    group.operator.wait_ready()
    assert [is_gone(process) for process in (victim, sibling, pid)] == [True] * 3
    assert len(group.ranks(worker)) == 2


def test_a_stopped_rank_costs_its_worker_and_no_token(group: Group, told: dict[str, str]) -> None:
    """Its worker answers pings during a step that may take minutes, so the rank itself is watched."""
    with group.slowed():
        streams = {case: group.begun(case) for case in CASES}
        worker = group.worker_of(streams["greedy"])
        pid = group.pid(worker)
        os.kill(group.ranks(worker)[1], signal.SIGSTOP)
    group.operator.wait_gone(worker, pid)
    group.daemon.wait_for(f"{worker} hung, killing it: one of its ranks was stopped (SIGSTOP) for {SILENCE_S:.0f} s")
    answers = {case: stream.result() for case, stream in streams.items()}
    assert {case: (answer.error, answer.choices[0].text) for case, answer in answers.items()} == {
        case: (None, told[case]) for case in answers
    }
    group.operator.wait_ready()
