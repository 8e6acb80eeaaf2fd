"""Other programs' memory on a device reduces its worker's capacity until they free it."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from melld.ids import RequestId, WorkerId
from melld.kvstore.capacity import STEPS, CapacityRule
from melld.kvstore.device_reading import DeviceReading, DeviceState
from melld.scheduler import events
from tests.kvstore.test_nvml import FIRST, Machine, library, machine, shared  # noqa: F401  fixtures
from tests.scheduler.driving import scheduler_with

OWN, BLOCK = 64_000, 1_000


def reading(others_bytes: int | None, state: DeviceState = DeviceState.OK) -> DeviceReading:
    return DeviceReading(state=state, used_by_others_bytes=others_bytes)


def test_memory_used_before_the_worker_s_measurement_is_not_deducted() -> None:
    """A desktop that already had its share when the worker measured the device costs nothing more."""
    rule = CapacityRule(OWN, BLOCK)
    assert [rule.seen(reading(others)) for others in (5_000, 5_000, 4_000)] == [None, None, None]
    assert rule.told_bytes == OWN


def test_capacity_follows_down_and_up() -> None:
    """A notebook takes memory and frees it: both changes are reported, in whole blocks."""
    rule = CapacityRule(OWN, BLOCK)
    seen = [rule.seen(reading(others)) for others in (0, 10_500, 10_500, 30_000, 0)]
    assert seen == [None, 53_000, None, 34_000, OWN]


def test_small_changes_are_not_reported_but_a_full_return_is() -> None:
    """Drivers come and go; a worker that may use everything again is never left with a little less."""
    own_bytes = 10 * OWN + 500
    rule = CapacityRule(own_bytes, BLOCK)
    seen = [rule.seen(reading(others)) for others in (0, 9_500, 10_500, 40_500, 5_500, 0, 0)]
    assert seen == [None, None, 630_000, 600_000, 635_000, own_bytes, None]
    exact = CapacityRule(10 * OWN, BLOCK)
    assert [exact.seen(reading(others)) for others in (0, 10 * OWN // STEPS)] == [None, 10 * OWN - 10 * OWN // STEPS]


def test_an_unknown_reading_changes_nothing() -> None:
    """A GPU that does not answer, or hides its processes, is no reason to push requests away."""
    rule = CapacityRule(OWN, BLOCK)
    rule.seen(reading(0))
    assert rule.seen(reading(40_000)) == 24_000
    assert rule.seen(reading(None)) is None
    assert rule.seen(reading(0, DeviceState.LATE)) is None
    assert rule.told_bytes == 24_000


@given(st.lists(st.integers(0, 3 * OWN), min_size=1, max_size=30))
def test_the_reported_capacity_is_accurate_and_never_zero(others: list[int]) -> None:
    """Whatever others do, the scheduler's figure is within a small step of the truth."""
    rule = CapacityRule(OWN, BLOCK)
    for now in others:
        rule.seen(reading(now))
        truth = min(OWN, max(OWN - max(0, now - others[0]), BLOCK))
        assert BLOCK <= rule.told_bytes <= OWN
        assert rule.told_bytes % BLOCK == 0
        assert abs(rule.told_bytes - truth) <= OWN / STEPS + BLOCK


def test_a_neighbour_on_the_gpu_makes_requests_leave(machine: Machine) -> None:  # noqa: F811
    """From the driver's figures to the move: requests leave before vLLM must preempt them."""
    rule, scheduler = CapacityRule(1000, 10), scheduler_with(2, policy="mell-plus")
    worker = WorkerId("w0")
    machine.set(gpu0_used=30_000, gpu0_process="100 20000")
    for number in range(3):
        scheduler.handle(events.RequestArrived(0.0, RequestId(f"r{number}"), 300))
    assert rule.seen(msgspec.convert(machine.ask("read", FIRST, [[100]]), DeviceReading)) is None
    machine.set(gpu0_used=30_500)
    capacity_bytes = rule.seen(msgspec.convert(machine.ask("read", FIRST, [[100]]), DeviceReading))
    assert capacity_bytes == 500
    scheduler.handle(events.WorkerCapacityChanged(1.0, worker, capacity_bytes))
    commands = scheduler.handle(events.EpochStarted(1.1))
    moved = [command for command in commands if isinstance(command, events.MoveRequest)]
    assert {(move.source, move.destination) for move in moved} == {("w0", "w1")}
    assert sum(move.kv_bytes for move in moved) >= 400
