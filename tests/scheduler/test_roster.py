"""Which sleeping worker is woken first, and which sizes some worker can hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from melld.errors import IllegalTransition
from melld.ids import WorkerId
from melld.scheduler import events as e
from melld.scheduler.roster import Roster
from melld.scheduler.state import Duty, Worker
from tests.effort import examples
from tests.scheduler.driving import arrive, finish, placed, scheduler_with

SIZES = st.sampled_from([0, 1, 99, 100, 101, 200, 1000])


def test_a_warm_worker_is_woken_before_a_cold_one() -> None:
    """No request waits for a start while a warm worker has room."""
    scheduler = scheduler_with(workers=3)
    scheduler.handle(e.WorkerWakeTimeChanged(1.0, "w0", 5.0))
    assert placed(arrive(scheduler, "r1", 900, 2.0)) == {"r1": "w1"}
    assert placed(arrive(scheduler, "r2", 900, 2.0)) == {"r2": "w2"}
    assert placed(arrive(scheduler, "r3", 900, 2.0)) == {"r3": "w0"}


def test_a_worker_that_is_warm_again_is_first_again() -> None:
    """The same few workers are in use again and again."""
    scheduler = scheduler_with(workers=2)
    scheduler.handle(e.WorkerWakeTimeChanged(1.0, "w0", 5.0))
    scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w0", 0.0))
    assert placed(arrive(scheduler, "r1", 900, 3.0)) == {"r1": "w0"}
    finish(scheduler, "r1", 4.0)
    scheduler.handle(e.EpochStarted(5.0))
    assert placed(arrive(scheduler, "r2", 900, 6.0)) == {"r2": "w0"}


def test_a_wake_time_of_an_active_or_unknown_worker_is_harmless() -> None:
    """It may be reported late: its value counts when the worker sleeps."""
    scheduler = scheduler_with(workers=2)
    arrive(scheduler, "r1", 900, 1.0)
    assert scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w0", 5.0)) == []
    assert scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w9", 5.0)) == []
    finish(scheduler, "r1", 3.0)
    scheduler.handle(e.EpochStarted(4.0))
    assert placed(arrive(scheduler, "r2", 900, 5.0)) == {"r2": "w1"}


def test_a_negative_wake_time_is_refused() -> None:
    """And changes nothing."""
    with pytest.raises(ValueError, match="wakes in -1"):
        scheduler_with().handle(e.WorkerWakeTimeChanged(1.0, "w0", -1.0))


def test_a_worker_that_wakes_and_sleeps_for_years_takes_no_more_memory() -> None:
    """On a quiet daemon each request wakes a worker, which sleeps again after it."""
    scheduler, now_s = scheduler_with(workers=2), 1.0
    for number in range(50):
        arrive(scheduler, f"r{number}", 900, now_s)
        finish(scheduler, f"r{number}", now_s + 1.0)
        scheduler.handle(e.EpochStarted(now_s := now_s + 2.0))
    assert len(scheduler.cluster.roster._asleep) <= 2


class RosterMachine(RuleBasedStateMachine):
    """Workers that come, go, wake, sleep and change, compared with a full scan."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.added = 0
        self.largest_block_bytes = 0

    @property
    def workers(self) -> list[Worker]:
        return list(self.roster.workers.values())

    @rule(capacity_bytes=SIZES, slots=st.integers(0, 2), block_bytes=st.integers(0, 8), machine=st.integers(0, 2))
    def come(self, capacity_bytes: int, slots: int, block_bytes: int, machine: int) -> None:
        event = e.WorkerUp(0.0, WorkerId(f"w{self.added}"), capacity_bytes, slots, machine, block_bytes=block_bytes)
        worker = self.roster.add(event)
        assert (worker.capacity_bytes, worker.slots, worker.machine) == (capacity_bytes, slots, machine)
        self.largest_block_bytes = max(self.largest_block_bytes, block_bytes)
        self.added += 1
        with pytest.raises(IllegalTransition):
            self.roster.add(event)

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def go(self, data: st.DataObject) -> None:
        self.roster.remove(data.draw(st.sampled_from(self.workers)))

    @rule(data=st.data(), duty=st.sampled_from([*Duty]))
    @precondition(lambda self: self.workers)
    def change_duty(self, data: st.DataObject, duty: Duty) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.state is Duty.ASLEEP:
            self.roster.sleeps_no_more(worker)
        worker.state = duty
        if duty is Duty.ASLEEP:
            self.roster.sleeps(worker)
        self.roster.note()

    @rule(data=st.data(), wake_s=st.sampled_from([0.0, 2.0, 5.0]), now_s=st.floats(1.0, 9.0))
    @precondition(lambda self: self.workers)
    def wake_in(self, data: st.DataObject, wake_s: float, now_s: float) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        since_s = worker.ready_s if worker.wake_s == wake_s else now_s
        self.roster.wakes_in(worker, wake_s, now_s)
        assert (worker.wake_s, worker.ready_s) == (wake_s, since_s)

    @rule(data=st.data(), capacity_bytes=SIZES, slots=st.integers(0, 2))
    @precondition(lambda self: self.workers)
    def offer(self, data: st.DataObject, capacity_bytes: int, slots: int) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        worker.capacity_bytes, worker.slots, worker.offered_slots = capacity_bytes, slots, slots
        worker.largest_capacity_bytes = max(worker.largest_capacity_bytes, capacity_bytes)
        self.roster.note()

    @invariant()
    def the_one_that_wakes_soonest_is_named(self) -> None:
        for kv_bytes in (0, 1, 100, 150, 1000, 1001):
            usable = [worker for worker in self.workers if worker.slots > 0 and worker.capacity_bytes >= kv_bytes]
            asleep = [worker for worker in usable if worker.state is Duty.ASLEEP]
            soonest = min(asleep, key=lambda worker: (worker.wake_s, worker.machine, worker.rank), default=None)
            assert self.roster.sleeping(kv_bytes) is soonest
            is_open = any(worker.state in (Duty.ASLEEP, Duty.ACTIVE) for worker in usable)
            assert self.roster.could_hold(kv_bytes) == is_open
        asleep = [worker for worker in self.workers if worker.state is Duty.ASLEEP]
        assert len(self.roster._asleep) == len(asleep), "what it keeps grows with every wake and every sleep"

    @invariant()
    def every_worker_is_on_its_machine(self) -> None:
        found = [worker for machine in self.roster.machines.values() for worker in machine.values()]
        assert sorted(found, key=lambda worker: worker.rank) == self.workers
        for machine, here in self.roster.machines.items():
            assert {worker.machine for worker in here.values()} == {machine}

    @invariant()
    def the_largest_are_known(self) -> None:
        largest = max((worker.largest_capacity_bytes for worker in self.workers), default=0)
        assert self.roster.largest_capacity_bytes == largest
        assert self.roster.block_bytes == self.largest_block_bytes
        ranks = [worker.rank for worker in self.workers]
        assert ranks == sorted(set(ranks))


TestRosterMachine = RosterMachine.TestCase
TestRosterMachine.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
