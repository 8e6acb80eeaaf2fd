"""The driver between events and commands: a failure on the way ends nothing but itself."""

import logging
from typing import Any

import msgspec
import pytest

from melld.driver.driver import NotCarriedOut
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.migrate.messages import DescribeRequest
from melld.scheduler import events
from tests.serve.offline_daemon import W0, W2, OfflineDaemon, OfflineFleet


class BrokenWire(OfflineFleet):
    """Fails to write these requests: a bug of ours, wherever it may be."""

    broken: frozenset[str] = frozenset()

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Any = ()) -> None:
        if getattr(message, "request", None) in self.broken:
            raise ValueError("it cannot be written")
        super().send(worker, message, payload)


@pytest.fixture
async def daemon() -> OfflineDaemon:
    """Three workers with a request each, and a log of who failed."""
    return OfflineDaemon(fleet=BrokenWire)


def failed(daemon: OfflineDaemon) -> dict[RequestId, MelldError]:
    failures = daemon.fleet.requests.failures
    return dict(failures.get_nowait() for _ in range(failures.qsize()))


def lose(daemon: OfflineDaemon, worker: WorkerId) -> None:
    ended = WorkerEnded(worker, "ended by SIGKILL", expected=False, from_outside=True)
    daemon.fleet.worker_ended(daemon.fleet.slots[worker], ended)


async def test_a_failed_command_does_not_stop_the_others(
    daemon: OfflineDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests lose their worker, and one cannot be placed: its client hears of it, the other's stream goes on."""
    names = [daemon.admit(f"r{number}", 4) for number in range(6)]
    first, second = (name for name in names if daemon.where(name) == W0)
    BrokenWire.broken = frozenset({first})
    try:
        with caplog.at_level(logging.ERROR):
            lose(daemon, W0)
    finally:
        BrokenWire.broken = frozenset()
    assert daemon.where(second) != W0
    assert any(isinstance(one, wire.ResumeRequest) and one.request == second for _, one in daemon.fleet.sent)
    assert isinstance(failed(daemon)[first], NotCarriedOut)
    assert first not in daemon.fleet.live
    assert first not in daemon.scheduler.cluster.requests
    assert len(caplog.records) == 1, "the fault is told once"


async def test_a_new_request_that_cannot_be_placed_is_refused_and_forgotten(daemon: OfflineDaemon) -> None:
    """Its client gets an error, and neither fleet nor scheduler keeps anything of it."""
    BrokenWire.broken = frozenset({"r0"})
    try:
        with pytest.raises(NotCarriedOut, match="it cannot be written"):
            daemon.admit("r0", 4)
    finally:
        BrokenWire.broken = frozenset()
    assert not daemon.fleet.live
    assert not daemon.scheduler.cluster.requests


async def test_a_move_that_cannot_start_does_not_block_others(daemon: OfflineDaemon) -> None:
    """It ends at its deadline; the others of the same epoch are under way."""
    first, second = (daemon.admit(f"r{number}", 1) for number in range(2))
    BrokenWire.broken = frozenset({first})
    try:
        for request in (first, second):
            daemon.driver.handle(events.MoveAsked(0.0, request=request, destination=W2))
        daemon.epoch()
    finally:
        BrokenWire.broken = frozenset()
    assert daemon.begun().keys() == {second}
    assert daemon.executor.moves.keys() == {first, second}


async def test_events_are_numbered_and_name_their_cause() -> None:
    """Anything can be traced back to the event that led to it."""
    told: list[tuple[events.AnyEvent, Any]] = []
    daemon = OfflineDaemon(taps=[lambda event, commands, _: told.append((event, commands))])
    told.clear()
    request = daemon.admit("r0", 4)
    daemon.driver.handle(events.MoveAsked(0.0, request=request, destination=W2))
    daemon.epoch()
    daemon.refuse(request)
    daemon.fleet.requests.abort(["r0"])
    (arrived, placed), (asked, moves), (_epoch, _), (aborted, _), (finished, _) = told
    assert [event.id - arrived.id for event, _ in told] == [0, 1, 2, 3, 4]
    assert {command.cause for command in placed} == {arrived.id}
    sent = {type(one): one.cause for _, one in daemon.fleet.sent if hasattr(one, "cause")}
    assert sent == {wire.AddRequest: arrived.id, DescribeRequest: asked.id}
    assert {command.cause for command in moves} == {asked.id}
    assert (arrived.cause, asked.cause, aborted.cause, finished.cause) == (0, 0, asked.id, 0)


async def test_a_consequence_names_its_event_as_the_cause() -> None:
    """A request that cannot be placed ends because it arrived."""
    told: list[events.AnyEvent] = []
    daemon = OfflineDaemon(fleet=BrokenWire, taps=[lambda event, *_: told.append(event)])
    told.clear()
    BrokenWire.broken = frozenset({"r0"})
    try:
        with pytest.raises(NotCarriedOut):
            daemon.admit("r0", 4)
    finally:
        BrokenWire.broken = frozenset()
    arrived, finished = told
    assert (type(finished), finished.cause) == (events.RequestFinished, arrived.id)


async def test_a_failing_listener_harms_nobody_else() -> None:
    """A broken decision log costs neither a request nor the events behind it."""
    heard: list[type] = []

    def break_down(*_: Any) -> None:
        raise OSError("no log")

    daemon = OfflineDaemon(taps=[break_down, lambda event, *_: heard.append(type(event))])
    daemon.admit("r0", 4)
    daemon.fleet.requests.abort(["r0"])
    assert heard[-2:] == [events.RequestArrived, events.RequestFinished]


async def test_a_request_that_crashes_the_policy_is_refused_and_forgotten(daemon: OfflineDaemon) -> None:
    """Even after the scheduler has noted the request, nothing of it stays."""

    def stumble(*_: Any) -> bool:
        raise ZeroDivisionError

    daemon.scheduler.policy.allocate = stumble  # type: ignore[method-assign]
    with pytest.raises(NotCarriedOut, match="ZeroDivisionError"):
        daemon.admit("r0", 4)
    assert not daemon.fleet.live
    assert not daemon.scheduler.cluster.requests


async def test_an_event_that_the_scheduler_rejects_does_not_harm_its_sender(daemon: OfflineDaemon) -> None:
    """The sender is in the middle of its own work: a worker's end, say, after which it must be restarted."""
    daemon.driver.handle(events.WorkerUp(0.0, W0, 1, 1))
    assert daemon.where(daemon.admit("r0", 4)) in daemon.fleet.slots


async def test_an_overtaken_event_is_still_handled(daemon: OfflineDaemon, caplog: pytest.LogCaptureFixture) -> None:
    """Of two simultaneous events the first may cause others; the second is older than those, and not lost."""
    early_s, late_s = daemon.clock() + 1.0, daemon.clock() + 2.0
    daemon.driver.handle(events.WorkerSlotsChanged(late_s, worker=W0, slots=3))
    daemon.driver.handle(events.WorkerSlotsChanged(early_s, worker=W2, slots=2))
    assert [daemon.driver._cluster.workers[worker].slots for worker in (W0, W2)] == [3, 2]
    assert not caplog.records
