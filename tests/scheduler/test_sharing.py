"""Blocks that several requests hold count once on their worker, and stay taken while one of them remains."""

import json

import pytest

from melld.decisions.recorder import Recorder
from melld.decisions.records import encode, header_record
from melld.scheduler import events as e
from melld.scheduler.scheduler import Scheduler
from melld.simulator.experiment import ALL_POLICIES
from tests.decisions.audit import Auditor
from tests.scheduler.driving import CAPACITY, arrive, finish, moved, placed, scheduler_with

PROMPT, OWN = 280, 20


def chats(scheduler: Scheduler, count: int) -> None:
    """Start chats with one long system prompt, whose workers report what they share."""
    for number in range(count):
        name = f"chat{number}"
        worker = placed(arrive(scheduler, name, PROMPT + OWN))[name]
        same = len(scheduler.cluster.workers[worker].requests)
        scheduler.handle(e.WorkerSharingChanged(0.0, worker, (same - 1) * PROMPT))


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_chats_with_one_system_prompt_run_where_it_fits_once(policy: str) -> None:
    """A hundred users of one assistant do not wait for memory that nobody uses."""
    scheduler = scheduler_with(workers=1, policy=policy)
    chats(scheduler, 22)
    worker = scheduler.cluster.workers["w0"]
    assert (len(worker.requests), worker.used_bytes) == (22, PROMPT + 22 * OWN)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_leaving_request_frees_only_what_it_does_not_share(policy: str) -> None:
    """The system prompt stays as long as somebody uses it; the worker's report says how much was freed."""
    scheduler = scheduler_with(workers=1, policy=policy)
    chats(scheduler, 10)
    before = scheduler.cluster.workers["w0"].used_bytes
    finish(scheduler, "chat0")
    assert scheduler.cluster.workers["w0"].used_bytes == before
    assert placed(arrive(scheduler, "large", CAPACITY - before + OWN)) == {}
    assert placed(scheduler.handle(e.WorkerSharingChanged(1.0, "w0", 8 * PROMPT))) == {"large": "w0"}
    for number in range(1, 10):
        finish(scheduler, f"chat{number}", 1.0)
    finish(scheduler, "large", 1.0)
    worker = scheduler.cluster.workers["w0"]
    assert (worker.used_bytes, worker.shared_bytes) == (0, 0)


def test_a_moving_request_is_counted_in_full_at_its_destination() -> None:
    """The destination may share nothing of it: only what a worker reports is shared."""
    scheduler = scheduler_with(workers=2, policy="most-free")
    chats(scheduler, 2)
    assert moved(scheduler.handle(e.WorkerDraining(1.0, "w0"))) == {"chat0": "w1"}
    scheduler.handle(e.MoveCommitted(2.0, "chat0"))
    assert [worker.used_bytes for worker in scheduler.cluster.workers.values()] == [0, 2 * (PROMPT + OWN)]
    scheduler.handle(e.WorkerSharingChanged(3.0, "w1", PROMPT))
    assert scheduler.cluster.workers["w1"].used_bytes == PROMPT + 2 * OWN


def test_a_worker_never_shares_more_than_it_holds() -> None:
    """A late report about requests that are gone frees no room."""
    scheduler = scheduler_with(workers=1)
    scheduler.handle(e.WorkerSharingChanged(0.0, "w0", 500))
    scheduler.handle(e.WorkerSharingChanged(0.0, "unknown", 500))
    assert placed(arrive(scheduler, "a", CAPACITY)) == {"a": "w0"}
    assert scheduler.cluster.workers["w0"].used_bytes == CAPACITY
    with pytest.raises(ValueError, match="-1"):
        scheduler.handle(e.WorkerSharingChanged(0.0, "w0", -1))


def test_an_auditor_of_the_log_sees_why_they_fit() -> None:
    """The sum of the sizes exceeds the capacity; the log says how much is shared."""
    scheduler = scheduler_with(workers=0)
    recorder = Recorder(scheduler)
    records = [header_record("best-fit", scheduler.settings, 0.0, 1e9, "0")]
    happened: list[e.AnyEvent] = [e.WorkerUp(0.0, "w0", CAPACITY), e.WorkerSharingChanged(0.0, "unknown", 1)]
    for number in range(8):
        happened.append(e.RequestArrived(0.0, f"chat{number}", PROMPT + OWN))
        happened.append(e.WorkerSharingChanged(0.0, "w0", number * PROMPT))
    happened += [e.RequestFinished(1.0, f"chat{number}") for number in range(8)]
    for event in happened:
        records += recorder.take(event, scheduler.handle(event))
    lines = [encode(record) for record in records]
    assert Auditor().read(lines).faults == []
    blind = [line for line in lines if json.loads(line)["kind"] != "share"]
    assert any("holds 1200 of 1000 bytes" in fault for fault in Auditor().read(blind).faults)
