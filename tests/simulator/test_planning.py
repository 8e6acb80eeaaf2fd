"""The daemon's planner in the simulator: where moves take time, boundaries hold for links and workers."""

import msgspec

from melld.migrate.boundaries import Prefill
from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.simulator.latency import ConstantLatency
from melld.simulator.links import LinkSettings
from melld.simulator.planning import boundaries_of, tokens_within
from melld.simulator.simulation import Simulation
from tests.simulator.setups import BLOCK_BYTES, SMALL, one_by_one
from tests.simulator.test_simulation import Script, activate, move, place, play, retire

LINK = LinkSettings(bytes_per_s=40 * BLOCK_BYTES)
AWAKE = [activate(worker) for worker in ("w0", "w1")]
ASLEEP = (events.EpochStarted, 60.0, [retire("w0"), retire("w1")])


def two_leave_at_once(link: LinkSettings, wake_s: float = 0.0, prefill_token_s: float = 0.0001) -> Script:
    """Start two moves of 16 blocks each in the same epoch, then play to the end."""
    latency = ConstantLatency(decode_step_s=0.02, prefill_token_s=prefill_token_s)
    settings = msgspec.structs.replace(SMALL, link=link, gpus=2, wake_s=wake_s, latency=latency)
    script = Script(
        (events.RequestArrived, 0.0, [*AWAKE, place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w0")]),
        (events.EpochStarted, 0.5, [move(name, "w0", "w1", 16 * BLOCK_BYTES) for name in ("r0", "r1")]),
        ASLEEP,
    )
    play(settings, one_by_one((0.1, 255, 400), (0.1, 255, 400)), script)
    return script


def ends(script: Script) -> list[tuple[str, str]]:
    """Return the committed moves with their ways."""
    return [(event.request, event.via) for event in script.heard_of(events.MoveCommitted)]  # type: ignore[union-attr]


def test_boundaries_follow_from_the_machines() -> None:
    """The simulator's boundaries are what the simulated machines can do."""
    limits = boundaries_of(SMALL, LINK)  # epochs of half a second, 0.1 ms a token
    assert limits.other_link_bytes == 20 * BLOCK_BYTES
    assert limits.other_prefill == Prefill(5000, 500)
    assert tokens_within(ConstantLatency(0.02, prefill_token_s=10.0), 0.5) == 1


def test_what_the_link_cannot_take_goes_by_tokens_in_the_same_epoch() -> None:
    """Both resources are used before any move waits."""
    fast, slow = two_leave_at_once(LINK), two_leave_at_once(LINK, prefill_token_s=0.001)
    assert [via for _, via in ends(fast)] == [Via.TOKENS, Via.TOKENS]
    assert sorted(via for _, via in ends(slow)) == [Via.KV, Via.TOKENS]
    assert all(event.at_s < 2.0 for event in slow.heard_of(events.MoveCommitted))


def test_a_move_that_fits_neither_way_waits_for_a_later_epoch() -> None:
    """Over a link that carries one of two requests in an epoch, the second begins when the first is through."""
    script = two_leave_at_once(msgspec.structs.replace(LINK, ways=(Via.KV,)))
    first, second = script.heard_of(events.MoveCommitted)
    assert (first.request, second.request) == ("r0", "r1")  # type: ignore[union-attr]
    assert first.at_s < 1.0 < second.at_s  # asked for at 0.5, epochs of 0.5 s


def test_a_waking_worker_computes_no_tokens() -> None:
    """Where only tokens may be sent, moves to it wait until it is awake."""
    script = two_leave_at_once(msgspec.structs.replace(LINK, ways=(Via.TOKENS,)), wake_s=3.0)
    assert [event.at_s > 3.0 for event in script.heard_of(events.MoveCommitted)] == [True, True]


def test_a_worker_that_wakes_instantly_computes_at_once() -> None:
    """A move to a freshly woken worker has both ways, and does not crawl over a slow link for want of one."""
    settings = msgspec.structs.replace(SMALL, link=LinkSettings(bytes_per_s=BLOCK_BYTES), gpus=2)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w0")]),
        (events.EpochStarted, 0.5, [activate("w1"), move("r0", "w0", "w1", 16 * BLOCK_BYTES)]),
        ASLEEP,
    )
    play(settings, one_by_one((0.1, 255, 400), (0.1, 255, 400)), script)
    assert ends(script) == [("r0", Via.TOKENS)]


def test_a_request_that_ends_while_its_move_waits_leaves_nothing_behind() -> None:
    """The planner forgets it, and the scheduler hears only of its end."""
    link = LinkSettings(bytes_per_s=4 * BLOCK_BYTES, ways=(Via.KV,))
    settings = msgspec.structs.replace(SMALL, link=link, gpus=2)
    script = Script(
        (events.RequestArrived, 0.0, [*AWAKE, place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w0")]),
        (events.EpochStarted, 0.5, [move(name, "w0", "w1", 16 * BLOCK_BYTES) for name in ("r0", "r1")]),
        ASLEEP,
    )
    simulation = Simulation(settings, one_by_one((0.1, 255, 400), (0.1, 255, 60)), script)  # type: ignore[arg-type]
    simulation.run()
    assert [event.request for event in script.heard_of(events.RequestFinished)] == ["r1", "r0"]  # type: ignore[union-attr]
    assert [event.request for event in script.heard_of(events.MoveAborted)] == []  # type: ignore[union-attr]
    assert simulation._moves.planning is not None
    assert simulation._moves.planning.planner.waiting == {}
