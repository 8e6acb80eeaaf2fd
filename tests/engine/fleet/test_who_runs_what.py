"""Fleet, scheduler, executor, ledger and supervisor always agree on who runs what."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from melld.control.status import WorkerState
from melld.decisions.stories import Happened
from melld.ids import RequestId, WorkerId
from melld.migrate.table import MoveState
from melld.scheduler.events import MoveAsked
from tests.effort import examples
from tests.engine.fleet.virtual_daemon import VirtualDaemon
from tests.engine.fleet.virtual_history import CHOICES, play
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually

HISTORIES = int(os.environ.get("MELLD_HISTORIES", "60"))
W0, W1, W2, W3 = (WorkerId(f"w{index}") for index in range(4))


@settings(max_examples=examples(HISTORIES), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, CHOICES - 1), min_size=40, max_size=100))
def test_all_records_agree_and_every_request_completes(choices: list[int]) -> None:
    """Under deaths, drains, sleeps, refusals and disconnects at any moment: no stream hangs, no token is lost."""
    play(choices)


def test_shared_blocks_are_counted_once_and_never_given_out_twice() -> None:
    """Four chats of two blocks run in six with one in common; one that leaves frees no room that is not there."""

    async def story(daemon: VirtualDaemon) -> None:
        chats = []
        for _ in range(4):
            chats.append(daemon.admit(2, 12, prefix_blocks=1))
            await daemon.flush()
            await asyncio.sleep(0.2)
        assert [where(daemon, chat) for chat in chats] == [W0] * 4
        daemon.leave(chats[0])
        whole = daemon.admit(2, 8)
        assert daemon.fleet.live[whole].worker is None, "the others hold what it held"
        await daemon.flush()
        await asyncio.sleep(0.2)
        assert where(daemon, whole) == W0

    on_a_daemon(1, story)


def test_a_suspended_request_resumes_and_drops_its_late_output() -> None:
    """The step made before the worker heard of the suspension does not count: no token comes twice."""

    async def story(daemon: VirtualDaemon) -> None:
        low = daemon.admit(4, 12, priority=1)
        await daemon.flush()
        daemon.worker(W0).step()
        await daemon.flush()
        seen = len(daemon.clients[low])
        high = daemon.admit(3, 4, priority=-1)
        daemon.worker(W0).step()
        await asyncio.sleep(0.2)
        await daemon.settle()
        live = daemon.fleet.live[low]
        assert (live.worker, live.suspensions, where(daemon, high)) == (None, 1, W0)
        await daemon.flush()
        assert len(daemon.clients[low]) == seen
        assert Happened.SUSPENDED in [line.what for line in daemon.stories.story(low).lines]

    on_a_daemon(1, story, "mell-plus")


def test_a_lost_machine_is_one_event_and_serves_again_on_return() -> None:
    """Its requests are placed once, on another machine, in order; nothing is tried there until it is back."""

    async def story(daemon: VirtualDaemon) -> None:
        requests = [daemon.admit(1, 12) for _ in range(4)]
        await daemon.flush()
        daemon.worker(W1).step()
        await daemon.flush()
        theirs = [request for request in requests if where(daemon, request) in (W1, W3)]
        assert {where(daemon, request) for request in theirs} == {W1, W3}
        daemon.lose_machine("m1")
        daemon.check()
        for request in theirs:
            assert where(daemon, request) in (W0, W2)
            told = [line.worker for line in daemon.stories.story(request).lines if line.what is Happened.PLACED]
            assert len(told) == 2, told
        await asyncio.sleep(30.0)
        places = daemon.fleet.places
        assert [(places[name].state, places[name].process) for name in (W1, W3)] == [(WorkerState.WAITING, None)] * 2
        daemon.return_machine("m1")
        await asyncio.sleep(1.1)
        for name in (W1, W3):
            daemon.worker(name).become_ready()
        await daemon.flush()
        assert all(daemon.fleet.is_ready(name) for name in (W1, W3))

    on_a_daemon(4, story, machines=2)


def test_a_stopped_worker_of_a_lost_machine_is_not_woken() -> None:
    """The scheduler counts on a sleeper without a process, but not without its machine."""

    async def story(daemon: VirtualDaemon) -> None:
        daemon.fleet.supervisor.sleep(W1)
        daemon.fleet.stop_worker(W1)
        await daemon.flush()
        assert daemon.fleet.places[W1].offer is not None
        daemon.lose_machine("m1")
        daemon.check()
        assert daemon.fleet.places[W1].offer is None
        crowd = [daemon.admit(3, 6) for _ in range(3)]
        await daemon.flush()
        assert {daemon.fleet.live[request].worker for request in crowd} == {W0, None}

    on_a_daemon(2, story, machines=2)


def on_a_daemon(
    workers: int,
    story: Callable[[VirtualDaemon], Coroutine[Any, Any, None]],
    policy: str = "most-free",
    machines: int = 1,
) -> None:
    """Play the story, then let everything complete."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers, policy, machines=machines).start()
        await story(daemon)
        daemon.check()
        await daemon.finish()
        await daemon.close()

    run_virtually(told)


def where(daemon: VirtualDaemon, request: RequestId) -> WorkerId:
    worker = daemon.fleet.live[request].worker
    assert worker is not None
    return worker


async def handed_over(daemon: VirtualDaemon) -> tuple[RequestId, WorkerId, WorkerId]:
    """Return a freshly handed-over request, its source and destination: the source still holds its blocks."""
    request = daemon.admit(2, 8)
    await daemon.flush()
    source = where(daemon, request)
    destination = W1 if source == W0 else W0
    for _ in range(2):  # the second chunk of its prompt brings its first token
        daemon.worker(source).step()
    await daemon.flush()
    daemon.spawn(daemon.driver.migrate(request, destination, None))
    await daemon.advance_move(request, MoveState.RELEASING)
    return request, source, destination


def test_a_request_completes_though_its_destination_dies_before_the_release() -> None:
    """A crash in a moved request's first step: its stream goes on elsewhere and does not hang."""

    async def story(daemon: VirtualDaemon) -> None:
        request, source, destination = await handed_over(daemon)
        daemon.worker(destination).die()
        assert where(daemon, request) == source

    on_a_daemon(2, story)


def test_the_story_of_a_moved_request_that_lost_its_worker_is_complete() -> None:
    """`melld why` says who moved it, where it was when its worker died, and how long its client saw nothing."""

    async def story(daemon: VirtualDaemon) -> None:
        request, source, destination = await handed_over(daemon)
        await daemon.flush()
        daemon.worker(destination).step()
        await daemon.flush()
        daemon.worker(destination).die()
        await asyncio.sleep(0.5)
        await daemon.flush()
        daemon.worker(source).step()
        await daemon.flush()
        lines = daemon.stories.story(request).lines
        told = [(line.what, line.source, line.worker) for line in lines]
        assert told == [
            (Happened.ARRIVED, "", ""),
            (Happened.PLACED, "", source),
            (Happened.MOVE_BEGAN, source, destination),
            (Happened.MOVED, source, destination),
            (Happened.RESUMED, "", destination),
            (Happened.DISPLACED, destination, ""),
            (Happened.PLACED, "", source),
            (Happened.RESUMED, "", source),
        ]
        assert [line.reason for line in lines if line.reason] == ["arrival", "operator", "room"]
        began, moved, resumed = lines[2:5]
        assert (moved.cause, resumed.cause) == (began.event, began.event)
        assert (lines[6].event, lines[7].cause) == (lines[5].event, lines[5].event)
        assert lines[7].pause_s is not None
        assert lines[7].pause_s == pytest.approx(0.5)

    on_a_daemon(2, story)


def test_the_scheduler_hears_of_a_hand_over_at_once() -> None:
    """It never counts the request on the source while the fleet counts it on the destination."""

    async def story(daemon: VirtualDaemon) -> None:
        request, source, destination = await handed_over(daemon)
        assert where(daemon, request) == destination
        assert list(daemon.cluster.workers[destination].requests) == [request]
        assert not daemon.cluster.workers[source].requests

    on_a_daemon(2, story)


def test_room_freed_by_a_hand_over_is_free_for_the_next_request() -> None:
    """A worker never gets more than it holds: it reads the release before it reads of the next request."""

    async def story(daemon: VirtualDaemon) -> None:
        first = daemon.admit(4, 8)
        second = daemon.admit(4, 8)
        await daemon.flush()
        source = where(daemon, first)
        [destination] = {W0, W1, W2} - {source, where(daemon, second)}
        beside = daemon.admit(1, 8)
        whole = daemon.admit(6, 8)
        await daemon.flush()
        assert [daemon.fleet.live[one].worker for one in (beside, whole)] == [destination, None]
        daemon.spawn(daemon.driver.migrate(first, destination, None))
        await daemon.advance_move(first, MoveState.RELEASING)
        assert where(daemon, whole) == source

    on_a_daemon(3, story)


def test_a_request_that_races_with_the_last_worker_s_sleep_is_answered() -> None:
    """It is held until the worker is back, and not lost with it."""

    async def story(daemon: VirtualDaemon) -> None:
        daemon.fleet.supervisor.sleep(W0)
        daemon.fleet.stop_worker(W0)
        daemon.admit(1, 4)
        assert daemon.fleet.supervisor.places[W0].state is WorkerState.WAKING

    on_a_daemon(1, story)


def test_a_worker_stopped_with_requests_on_it_restarts() -> None:
    """Whoever stopped it, and why: unless an operator keeps it out, its requests do not wait forever."""

    async def story(daemon: VirtualDaemon) -> None:
        daemon.admit(1, 4)
        await daemon.flush()
        daemon.fleet.stop_worker(W0)
        await daemon.flush()
        assert daemon.fleet.supervisor.places[W0].state is WorkerState.STARTING

    on_a_daemon(1, story)


def test_nothing_is_placed_on_a_worker_that_has_just_died() -> None:
    """Its death ends a request that had killed before: that room is not given away with the worker."""

    async def story(daemon: VirtualDaemon) -> None:
        deadly = daemon.admit(4, 8)
        await daemon.flush()
        daemon.worker(where(daemon, deadly)).die(-6)
        await daemon.flush()
        waiting = daemon.admit(4, 8)
        assert daemon.fleet.live[waiting].worker is None
        daemon.worker(where(daemon, deadly)).die(-6)
        assert deadly in daemon.errors
        assert daemon.fleet.live[waiting].worker is None

    on_a_daemon(2, story)


def test_a_worker_drained_again_while_resuming_stays_drained() -> None:
    """Two operators at once: the last word counts."""

    async def story(daemon: VirtualDaemon) -> None:
        for operation in (daemon.drains.drain(W0, False, None), daemon.drains.resume(W0)):
            daemon.spawn(operation)
            await daemon.settle()
        daemon.spawn(daemon.drains.drain(W0, False, None))
        await daemon.flush()
        assert daemon.fleet.supervisor.places[W0].state is WorkerState.STOPPED
        daemon.spawn(daemon.drains.resume(W0))

    on_a_daemon(2, story)


def test_a_suspect_taken_from_a_worker_is_not_retried_there() -> None:
    """A slowly ending worker is drained, resumed and drained again: its suspects go on elsewhere, once."""

    async def story(daemon: VirtualDaemon) -> None:
        requests = [daemon.admit(1, 8) for _ in range(4)]
        await daemon.flush()
        victim = where(daemon, requests[0])
        daemon.worker(victim).die(-6)
        other = W1 if victim == W0 else W0
        await asyncio.sleep(1.1)
        await daemon.settle()
        daemon.worker(victim).become_ready()
        await daemon.flush()
        assert {where(daemon, request) for request in requests} == {other}
        for operation in (daemon.drains.drain(other, False, 0.0), daemon.drains.resume(other)):
            daemon.spawn(operation)
            await asyncio.sleep(0.01)
        daemon.spawn(daemon.drains.drain(other, False, None))
        await daemon.settle()
        daemon.check()
        await daemon.flush()
        daemon.spawn(daemon.drains.resume(other))

    on_a_daemon(2, story)


def test_a_late_cleanup_of_a_move_does_not_end_a_newer_one() -> None:
    """Its destination died and is back, the source is slow to thaw: the same move, wanted again, is carried out."""

    async def story(daemon: VirtualDaemon) -> None:
        request = daemon.admit(2, 8)
        await daemon.flush()
        source = where(daemon, request)
        destination = W1 if source == W0 else W0
        daemon.spawn(daemon.driver.migrate(request, destination, None))
        await daemon.advance_move(request, MoveState.ATTACHING)
        daemon.worker(destination).die()
        while not daemon.fleet.is_ready(destination):
            await asyncio.sleep(0.1)
            daemon.worker(destination).become_ready()
            daemon.worker(destination).deliver()
        daemon.driver.handle(MoveAsked(daemon.now_s, request=request, destination=destination))
        daemon.check()
        await daemon.flush()
        daemon.check()
        await asyncio.sleep(0.3)
        await daemon.flush()
        assert where(daemon, request) == destination

    on_a_daemon(2, story)
