"""The daemon's moves between decision and start: real driver, planner, executor and fleet."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from melld.cli.migrate import in_words, was_moved
from melld.control.messages import AlreadyThere
from melld.driver.moves import MoveCancelled
from melld.engine.wire import messages as wire
from melld.ids import RequestId
from melld.migrate.snapshot import MoveRefused, Phase, Via
from melld.migrate.wish import Cause
from melld.scheduler import events
from melld.scheduler.reasons import Reason
from melld.scheduler.state import RequestState
from tests.scheduler.law import check_cluster
from tests.serve.offline_daemon import BLOCK_BYTES, BLOCKS, TIGHT, W0, W1, W2, OfflineDaemon


@pytest.fixture
async def daemon() -> Iterator[OfflineDaemon]:
    """Two requests of four blocks on one worker, whose link to another carries one of them per epoch."""
    daemon = OfflineDaemon()
    yield daemon
    check_cluster(daemon.scheduler.cluster)


async def two_on_w0(daemon: OfflineDaemon) -> tuple[RequestId, RequestId]:
    """Most-free spreads: each round fills three workers."""
    names = [daemon.admit(f"r{number}", 4) for number in range(6)]
    here = [name for name in names if daemon.where(name) == W0]
    return here[0], here[1]


async def test_an_operator_s_move_starts_at_once_within_the_boundaries(daemon: OfflineDaemon) -> None:
    """`melld migrate` does not wait for an epoch while there is room."""
    first, _ = await two_on_w0(daemon)
    task = daemon.ask(first, W1)
    await asyncio.sleep(0)
    assert daemon.begun() == {first: W0}
    daemon.refuse(first)
    report = await task
    assert (report.outcome, report.reason) == ("refused", "it will not")
    assert daemon.state(first) is RequestState.RUNNING


async def test_a_move_beyond_the_link_s_budget_waits_with_its_cause(daemon: OfflineDaemon) -> None:
    """An operator sees why it does not start, and that it does once the link is free."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    assert daemon.begun() == {first: W0}
    assert daemon.causes() == {second: Cause.LINK}
    assert daemon.driver.wanted.why_deferred(second) == "the link is full"
    assert daemon.driver.wanted.why_deferred(first) == ""
    daemon.epoch()
    assert daemon.causes() == {second: Cause.LINK}  # the first is still on its way
    daemon.refuse(first)
    daemon.epoch()
    assert daemon.begun().keys() == {first, second}
    daemon.refuse(second)
    assert [report.outcome for report in await asyncio.gather(*tasks)] == ["refused", "refused"]


async def test_a_move_is_not_ordered_twice(daemon: OfflineDaemon) -> None:
    """Nobody waits for a move that another operator has ordered, maybe to elsewhere, whether it waits or has begun."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    for name in (first, second):
        with pytest.raises(MoveRefused, match="on its way already"):
            await daemon.ask(name, W2)
    daemon.refuse(first)
    daemon.epoch()
    daemon.epoch()
    daemon.refuse(second)
    assert [report.destination for report in await asyncio.gather(*tasks)] == [W1, W1]


async def test_a_copy_larger_than_a_boundary_is_paced(daemon: OfflineDaemon) -> None:
    """Requests that decode beside it are promised that the link carries at most its boundary per epoch."""
    large = daemon.admit("large", 10)
    source = daemon.where(large)
    task = daemon.ask(large, W1 if source == W0 else W0, Via.KV)
    await asyncio.sleep(0)
    wish = daemon.executor.moves[large].migration.wish
    boundary, kv_bytes = TIGHT.other_link_bytes, daemon.scheduler.cluster.requests[large].kv_bytes
    assert kv_bytes > boundary
    pace = wish.paces[Via.KV]
    assert pace.per_s == boundary / TIGHT.epoch_s
    assert pace.takes_s == pytest.approx(kv_bytes / boundary * TIGHT.epoch_s)
    daemon.refuse(large)
    await task


@pytest.mark.parametrize(("after_first_token", "blocks"), [(False, 2), (True, 10)])
async def test_a_move_during_prefill_is_as_large_as_what_goes(
    daemon: OfflineDaemon, after_first_token: bool, blocks: int
) -> None:
    """What is computed so far takes no more of the link than that; a whole prompt's KV only follows a hand-over."""
    large = daemon.admit("large", 10)
    source = daemon.where(large)
    daemon.fleet.ledger.blocks_changed(source, (2, BLOCKS, 0), {large: (2, Phase.PREFILLING)})
    ends = large, W1 if source == W0 else W0
    task = asyncio.get_running_loop().create_task(daemon.driver.migrate(*ends, Via.KV, after_first_token))
    await asyncio.sleep(0)
    wish = daemon.executor.moves[large].migration.wish
    assert wish.kv_bytes == blocks * BLOCK_BYTES
    assert (Via.KV in wish.paces) == (wish.kv_bytes > TIGHT.other_link_bytes)
    daemon.refuse(large)
    await task


async def test_a_start_that_fails_leaves_no_order_behind(
    daemon: OfflineDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator hears how the move ends, and the scheduler's next one of that request is not taken for theirs."""

    def fail(worker: object, message: object, payload: object = ()) -> None:
        raise RuntimeError("no memory")

    first, _ = await two_on_w0(daemon)
    with monkeypatch.context() as patch:
        patch.setattr(daemon.fleet, "send", fail)
        task = daemon.ask(first, W1, Via.KV)
        await asyncio.sleep(0)
    assert daemon.executor.moves.keys() == {first}
    daemon.fleet.withdraw(W1)
    assert (await task).outcome == "destination died"
    size_bytes = daemon.scheduler.cluster.requests[first].kv_bytes
    daemon.driver.wanted.want(events.MoveRequest(Reason.OVERLOAD, first, W0, W2, size_bytes), is_epoch=True)
    [wish] = daemon.planner.waiting.values()
    assert (wish.asked, wish.via) == (False, None)


@pytest.mark.parametrize("via", [Via.TOKENS, None])
async def test_a_prompt_larger_than_a_boundary_is_paced(daemon: OfflineDaemon, via: Via | None) -> None:
    """The same goes for tokens, even when the source falls back to them because its KV cannot go."""
    large = daemon.admit("large", 10)
    source = daemon.where(large)
    task = daemon.ask(large, W1 if source == W0 else W0, via)
    await asyncio.sleep(0)
    wish, tokens = daemon.executor.moves[large].migration.wish, daemon.fleet.live[large].prompt_tokens
    boundary = TIGHT.prefill_tokens(wish.destination, 0)
    assert tokens > boundary
    assert wish.paces[Via.TOKENS].per_s == pytest.approx(boundary / TIGHT.epoch_s)
    assert wish.paces[Via.TOKENS].takes_s == pytest.approx(tokens / boundary * TIGHT.epoch_s)
    daemon.refuse(large)
    await task


async def test_unforced_moves_are_split_between_kv_and_tokens(daemon: OfflineDaemon) -> None:
    """Two requests of one worker leave at once: one over the link, one by its tokens."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1) for name in (first, second)]
    await asyncio.sleep(0)
    assert {str(daemon.driver.wanted.way_of(name)) for name in (first, second)} == {"kv", "tokens"}
    for name in (first, second):
        daemon.refuse(name)
    await asyncio.gather(*tasks)


async def test_kv_moves_between_machines_only_over_measured_links(daemon: OfflineDaemon) -> None:
    """A network may be far slower than recomputing the tokens: until it is measured, tokens go."""
    first, second = await two_on_w0(daemon)
    place = daemon.fleet.places[W1]
    place.slot = msgspec.structs.replace(place.slot, machine="elsewhere")
    daemon.executor.links[W0, W1] = wire.LinkOpened(peer=W0, transport="nixl")
    tasks = [daemon.ask(first, W1)]
    await asyncio.sleep(0)
    assert daemon.driver.wanted.way_of(first) is Via.TOKENS
    daemon.refuse(first)
    daemon.executor.links[W0, W1] = wire.LinkOpened(peer=W0, transport="nixl", bytes_per_s=1e7)
    tasks.append(daemon.ask(second, W1))
    await asyncio.sleep(0)
    assert daemon.driver.wanted.way_of(second) is Via.KV
    daemon.refuse(second)
    await asyncio.gather(*tasks)


async def test_a_finished_request_cancels_its_waiting_move(daemon: OfflineDaemon) -> None:
    """The operator hears of it, and the scheduler forgets it once."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    daemon.fleet.requests.abort([second])
    with pytest.raises(MoveCancelled, match="the request has finished"):
        await tasks[1]
    assert daemon.causes() == {}
    daemon.refuse(first)
    await tasks[0]


async def test_a_dead_worker_cancels_the_moves_to_it(daemon: OfflineDaemon) -> None:
    """The request stays where it is, is counted only there, and the operator hears why."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    assert daemon.state(second) is RequestState.MOVING
    daemon.fleet.withdraw(W1)
    with pytest.raises(MoveCancelled, match="w1 is gone"):
        await tasks[1]
    assert daemon.state(second) is RequestState.RUNNING
    assert daemon.causes() == {}
    tasks[0].cancel()


async def test_a_move_that_has_waited_too_long_is_cancelled(daemon: OfflineDaemon) -> None:
    """Its reason is outdated: the scheduler may decide anew."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    for _ in range(22):
        daemon.epoch()
    with pytest.raises(MoveCancelled, match="waiting for 2 s: the link is full"):
        await tasks[1]
    assert daemon.state(second) is RequestState.RUNNING
    daemon.refuse(first)
    await tasks[0]


async def test_a_failing_decision_leaves_no_order_behind(
    daemon: OfflineDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later move of the request would be taken for the operator's, and could wait for ever for who has left."""

    def fail(_event: events.AnyEvent) -> None:
        raise RuntimeError("a bug of the policy")

    first, _ = await two_on_w0(daemon)
    with monkeypatch.context() as patch:
        patch.setattr(daemon.driver, "handle", fail)
        with pytest.raises(RuntimeError, match="a bug of the policy"):
            await daemon.ask(first, W1)
    assert daemon.driver.wanted.asked == {}


async def test_a_move_waits_for_a_destination_that_is_not_ready(daemon: OfflineDaemon) -> None:
    """It starts when the waking worker is up, instead of failing at its deadline."""
    first, _ = await two_on_w0(daemon)
    facts = daemon.fleet.workers.pop(W1)
    task = daemon.ask(first, W1)
    await asyncio.sleep(0)
    assert daemon.causes() == {first: Cause.NO_WAY}
    daemon.fleet.workers[W1] = facts
    daemon.epoch()
    assert daemon.begun() == {first: W0}
    daemon.refuse(first)
    await task


async def test_a_move_to_the_current_worker_succeeds_at_once(daemon: OfflineDaemon) -> None:
    """`melld migrate` says so and keeps the request there."""
    first, _ = await two_on_w0(daemon)
    assert not daemon.driver.is_pinned(first)
    answer = await daemon.ask(first, W0)
    assert answer == AlreadyThere(request=first, worker=W0, pinned=True)
    assert daemon.driver.is_pinned(first)
    assert daemon.begun() == {}
    assert in_words(msgspec.to_builtins(answer)).startswith(f"{first} is already on w0, it stays there until")
    assert was_moved(msgspec.to_builtins(answer))


async def test_moves_are_planned_from_observations(daemon: OfflineDaemon) -> None:
    """The link's trial rate and the worker's own prompt costs: nothing else is measured."""
    assert daemon.driver.wanted.boundaries().prefill == {}
    times = daemon.fleet.workers[W1].times
    for decodes in range(1, 41):
        times.stepped(0.01 + 0.001 * decodes + 1e-4 * 100 * (decodes % 2), decodes, 100 * (decodes % 2))
    daemon.executor.links[W0, W1] = wire.LinkOpened(peer=W0, transport="shared_memory", bytes_per_s=1e9)
    learned = daemon.driver.wanted.boundaries()
    assert learned.link_bytes(W0, W1) == 100_000_000
    assert learned.prefill[W1].idle == pytest.approx(1000, rel=0.02)
    first, _ = await two_on_w0(daemon)
    task = asyncio.ensure_future(daemon.ask(first, W1))
    await asyncio.sleep(0)
    assert daemon.planner.boundaries == daemon.driver.wanted.boundaries()
    daemon.refuse(first)
    await task
