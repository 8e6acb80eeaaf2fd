"""Operation batching: the same requests are served, with moves that cost no more than the operations."""

import random
from itertools import chain

from hypothesis import Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from melld.scheduler import events as e
from tests.effort import examples
from tests.scheduler.policies.mell.sizes import CAPACITY, Packing
from tests.scheduler.policies.mell.test_theorem import EDGES, SIZES


def one_epoch(packing: Packing, first: list[int], seed: int, arrivals: list[int]) -> list[e.MoveRequest]:
    """Fill the workers, settle, then play one epoch's departures, growth and arrivals; return its moves."""
    chance = random.Random(seed)
    names = packing.arrive(*first)
    packing.epoch()
    packing.moves.clear()
    leaving = [name for name in names if chance.random() < 0.3]
    packing.finish(*leaving)
    growing = {}
    for name in names:
        old = packing.sizes[name]
        if name not in leaving and chance.random() < 0.5:
            growing[name] = chance.choice([old + 1, *(edge for edge in EDGES if old < edge <= 2 * old)])
    packing.grow({name: min(size, CAPACITY) for name, size in growing.items()})
    packing.arrive(*arrivals)
    packing.epoch()
    return packing.moves


@given(st.lists(SIZES, min_size=4, max_size=30), st.integers(0, 2**16), st.lists(SIZES, max_size=8))
@example(  # an arrival takes a hole and leaves its bin less than 75 % full, beside another such
    [221, 599, 188, 599, 21, 8, 599, 289, 800, 256, 1200, 105, 358, 139], 2152, [729, 189, 800, 518, 202]
)
@hypothesis_settings(max_examples=examples(60), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_batched_epoch_serves_the_same_and_moves_each_request_once(
    first: list[int], seed: int, arrivals: list[int]
) -> None:
    """No request waits because others were batched, no worker overflows, and none is moved back and forth.

    A request that steps aside to break a circle of moves may be moved twice, and so may one whose first move had to
    be carried out at once to make room for an arrival.
    """
    packing = Packing(batching=True)
    moves = one_epoch(packing, first, seed, arrivals)
    straight = [move.request for move in moves if move.reason != "circle"]
    assert arrivals or len(straight) == len(set(straight))
    assert not packing.queued
    assert not packing.policy.plan.held
    packing.check_theorem()
    packing.check_groups()
    at_once = Packing()
    one_epoch(at_once, first, seed, arrivals)
    assert not at_once.queued
    assert sorted(chain(*packing.bins())) == sorted(chain(*at_once.bins()))


def test_batching_saves_moves_over_a_run() -> None:
    """Its purpose (paper: 25-30 %): fewer moves for the same requests, epoch after epoch."""
    moves = {}
    for batching in (True, False):
        total = 0
        for seed in range(20):
            chance = random.Random(seed)
            first = [chance.randint(1, CAPACITY * 2 // 3) for _ in range(30)]
            arrivals = [chance.randint(1, CAPACITY * 2 // 3) for _ in range(9)]
            total += len(one_epoch(Packing(batching=batching), first, seed, arrivals))
        moves[batching] = total
    assert moves[True] < 0.9 * moves[False]


def test_an_arrival_takes_the_hole_that_a_refill_would_have_filled() -> None:
    """The refill has become unnecessary: nothing moves."""
    s = CAPACITY // 4 + 1
    for batching, moves in ((True, 0), (False, 1)):
        packing = Packing(batching=batching)
        first, *_ = packing.arrive(s, s, s, s, s)
        packing.epoch()
        packing.finish(first)
        packing.arrive(s)
        packing.epoch()
        assert len(packing.moves) == moves
        assert [len(sizes) for sizes in packing.bins()] == [3, 2]


def test_before_the_epoch_only_moves_for_arrivals_start() -> None:
    """What happens meanwhile may make held-back moves unnecessary."""
    packing = Packing(batching=True)
    s = CAPACITY // 4 + 1
    first, *_, last = packing.arrive(s, s, s, s)
    packing.finish(first)
    assert not packing.moves
    packing.finish(last)
    packing.epoch()
    assert not packing.moves


def test_growth_is_judged_one_horizon_ahead() -> None:
    """A request must leave while there is still room to grow into, so the move begins before the overflow."""
    moved_at = {}
    for horizon_s in (0.0, 10.0):
        packing = Packing(batching=True, horizon_s=horizon_s)
        names = packing.arrive(CAPACITY // 2, CAPACITY // 3)
        for step in range(1, 60):
            packing.grow({names[0]: CAPACITY // 2 + 10 * step, names[1]: CAPACITY // 3 + 10 * step})
            packing.epoch()
            if any(move.reason == "overload" for move in packing.moves):
                moved_at[horizon_s] = step
                break
    assert moved_at[10.0] <= moved_at[0.0] - 9
