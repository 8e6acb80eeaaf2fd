"""A slow way is not taken just because it is free: if waiting for the other is faster, a move waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.ids import RequestId
from melld.migrate.packing import SLACK_EPOCHS, Bin, Bins, Candidate, Waits, Way
from melld.migrate.planner import Planner, PlannerSettings
from melld.migrate.snapshot import Via
from melld.migrate.wish import Cause
from tests.migrate.test_planner import BUSY, COMPUTE, IDLE_COMPUTE, KV, LIMITS, LINK, ask, names, wanted, ways

PRESSED = PlannerSettings(patience=3)


def test_a_link_slower_than_waiting_for_the_compute_is_not_taken() -> None:
    """Ten epochs over the link, or one of waiting and a third of prefill: the second move waits, and says for what."""
    planner = Planner(LIMITS)
    ask(planner, *[wanted(name, 10 * LINK, 15) for name in ("first", "second")])
    assert ways(planner.epoch(BUSY).starts) == {"first": Via.TOKENS}
    assert [deferred.waits_for for deferred in planner.waiting.values()] == [Cause.COMPUTE]
    planner.ended(RequestId("first"))
    assert ways(planner.epoch(BUSY).starts) == {"second": Via.TOKENS}


def test_the_slower_way_is_taken_when_the_other_is_full_for_long() -> None:
    """Compute that is booked for ten epochs is worth less than a link that takes three."""
    planner = Planner(LIMITS)
    ask(planner, wanted("first", 10**6, 10 * COMPUTE), wanted("second", 3 * LINK, 15))
    assert ways(planner.epoch(BUSY).starts) == {"first": Via.TOKENS, "second": Via.KV}


def test_each_waiting_move_lengthens_the_queue() -> None:
    """Not every move waits for the same compute: once its queue outlasts the slow link, one goes by the link."""
    planner = Planner(LIMITS)
    ask(planner, *[wanted(f"r{n}", 4 * LINK, COMPUTE) for n in range(6)])
    assert sorted(ways(planner.epoch(BUSY).starts).values()) == [Via.KV, Via.TOKENS]


def test_impatience_does_not_make_a_slow_way_fast() -> None:
    """A move that has waited long gets the next turn in its bin, and the other bin stays open."""
    planner = Planner(LIMITS, PRESSED)
    ask(planner, wanted("large", 10**6, 6 * COMPUTE), wanted("waits", 50 * LINK, COMPUTE))
    assert names(planner.epoch(BUSY).starts) == ["large"]
    planner.ended(RequestId("large"))
    for _ in range(PRESSED.patience):
        assert names(planner.epoch(BUSY).starts) == []
    ask(planner, wanted("over the link", 40, ways=KV), wanted("too late", 10**6, 5))
    assert ways(planner.epoch(BUSY).starts) == {"over the link": Via.KV}
    assert planner.waiting[RequestId("too late")].waits_for is Cause.ELDER
    begun = [ways(planner.epoch(BUSY).starts) for _ in range(3)]
    assert {"waits": Via.TOKENS} in begun


def test_an_urgent_move_takes_the_way_that_ends_first() -> None:
    """A worker about to overflow is relieved by the move that ends first, not the one that begins first."""
    planner = Planner(LIMITS)
    ask(planner, wanted("first", 10 * LINK, IDLE_COMPUTE), wanted("second", 10 * LINK, 15, urgency_s=0.1))
    assert names(planner.epoch({}).starts) == ["second"]
    ask(planner, wanted("third", 10 * LINK, IDLE_COMPUTE, urgency_s=0.1))
    assert planner.at_once(RequestId("third"), {}) is None


BOUNDARIES: dict[Bin, int] = {("kv", "a", "d"): 10, ("tokens", "d"): 8}
WAYS = st.tuples(st.sampled_from(list(BOUNDARIES)), st.integers(1, 30), st.floats(0.1, 20.0)).map(
    lambda w: Way((w[0],), *w[1:])
)
BOOKED = st.fixed_dictionaries({name: st.integers(0, 40) for name in BOUNDARIES})


@given(st.lists(WAYS, max_size=2), BOOKED, BOOKED)
def test_the_fastest_way_is_taken_when_it_is_free(move: list[Way], used: dict[Bin, int], owed: dict[Bin, int]) -> None:
    """Whatever is booked, and no way is worth more than its own time."""
    bins = Bins(BOUNDARIES.__getitem__, used)
    kept = Waits(bins, owed).sensible(Candidate(tuple(move), pressing=False)).ways
    assert set(kept) <= set(move)
    assert bool(kept) == bool(move)
    free = [way.epochs for way in move if bins.fits(way)]
    assert all(way.epochs <= min(free, default=way.epochs) + SLACK_EPOCHS for way in kept)
    quickest = min(move, key=lambda way: way.epochs, default=None)
    assert quickest is None or not bins.fits(quickest) or quickest in kept


LINK_BIN, COMPUTE_BIN = BOUNDARIES
FULL = {COMPUTE_BIN: BOUNDARIES[COMPUTE_BIN]}


def kept(waits: Waits, *move: Way) -> list[Bin]:
    return [way.bins[0] for way in waits.sensible(Candidate(move, pressing=False)).ways]


@pytest.mark.parametrize(("owed", "ends"), [({COMPUTE_BIN: 17}, 4.5), ({}, 1.5)])
def test_the_wait_for_a_full_bin_is_its_debt_in_whole_epochs(owed: dict[Bin, int], ends: float) -> None:
    """And a way that is free now has none: the link is worth its own time alone."""
    full = Way((COMPUTE_BIN,), 8, 0.5)
    for link_epochs, worth in ((ends - SLACK_EPOCHS - 0.1, False), (ends - SLACK_EPOCHS + 0.1, True)):
        waits = Waits(Bins(BOUNDARIES.__getitem__, FULL), owed)
        assert kept(waits, Way((LINK_BIN,), 1, link_epochs), full) == [LINK_BIN, *[COMPUTE_BIN] * worth]


@pytest.mark.parametrize(("cost", "owed", "ends"), [(20, {}, 3.0), (25, {LINK_BIN: 6}, 5.0)])
def test_the_first_in_line_is_counted_once(cost: int, owed: dict[Bin, int], ends: float) -> None:
    """Its share now and the rest that it owes; the next one waits for both."""
    for compute_epochs, worth in ((ends - SLACK_EPOCHS - 0.1, False), (ends - SLACK_EPOCHS + 0.1, True)):
        waits = Waits(Bins(BOUNDARIES.__getitem__, {}), owed)
        kept(waits, Way((LINK_BIN,), cost, cost / 10))
        second = Way((LINK_BIN,), 10, 1.0), Way((COMPUTE_BIN,), 1, compute_epochs)
        assert kept(waits, *second) == [*[LINK_BIN] * worth, COMPUTE_BIN]
