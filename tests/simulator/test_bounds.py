"""Lower bounds on the number of workers: true, ordered, tight where the paper's counter-examples need them."""

import itertools
import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from melld.simulator import bounds as b

CAPACITY = 24
AT_THE_LIMITS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 23, 24])
SMALL_SETS = st.lists(AT_THE_LIMITS | st.integers(1, CAPACITY), max_size=6)


def brute_force(sizes: list[int], capacity: int) -> int:
    """Return the least number of workers over every assignment, by brute force."""
    for workers in range(len(sizes) + 1):
        for assignment in itertools.product(range(workers), repeat=len(sizes)):
            loads = [0] * workers
            for worker, size in zip(assignment, sizes, strict=True):
                loads[worker] += size
            if all(load <= capacity for load in loads):
                return workers
    raise AssertionError("one worker each always suffices")


def slow_l2(sizes: list[int], capacity: int) -> int:
    """Compute Martello and Toth's L2 straight from its definition."""
    best = 0
    for alpha in {0, *(size for size in sizes if 2 * size <= capacity)}:
        alone = [s for s in sizes if s > capacity - alpha]
        apart = [s for s in sizes if capacity - alpha >= s > capacity / 2]
        small = [s for s in sizes if capacity / 2 >= s >= alpha]
        more = -((len(apart) * capacity - sum(apart) - sum(small)) // capacity)
        best = max(best, len(alone) + len(apart) + max(0, more))
    return best


def slow_dual(sizes: list[int], capacity: int) -> int:
    """Compute the best of u(2), u(3) and u(4) straight from their definition."""

    def counted(size: int, parts: int) -> Fraction:
        whole, rest = divmod((parts + 1) * size, capacity)
        return Fraction(whole, parts) if rest else Fraction(size, capacity)

    return max(math.ceil(sum(counted(size, parts) for size in sizes)) for parts in (2, 3, 4))


def ascending(sizes: list[int]) -> b.Sizes:
    return np.array(sorted(sizes), dtype=np.int64)


def bound(sizes: list[int]) -> int:
    return b.lower_bound(np.array(sizes, dtype=np.int64), CAPACITY)


@given(SMALL_SETS)
def test_the_bound_does_not_exceed_the_optimum(sizes: list[int]) -> None:
    """A bound above the optimum would flatter the policies."""
    assert bound(sizes) <= brute_force(sizes, CAPACITY)


@given(st.lists(AT_THE_LIMITS, max_size=60))
def test_the_bound_is_the_best_of_the_known_ones(sizes: list[int]) -> None:
    """The simulator evaluates one function per epoch; it must lose nothing against volume, counting, L2 and u(k)."""
    volume = math.ceil(Fraction(sum(sizes), CAPACITY))
    counting = (math.ceil(Fraction(sum(size > CAPACITY // k for size in sizes), k - 1)) for k in (2, 3, 4))
    assert bound(sizes) == max(volume, *counting, slow_l2(sizes, CAPACITY), slow_dual(sizes, CAPACITY))


@given(st.lists(st.integers(1, 1000), max_size=40), st.sampled_from([1000, 1001, 1003]))
def test_l2_matches_its_definition(sizes: list[int], capacity: int) -> None:
    """The vectorised form must be Martello and Toth's, odd capacities included."""
    assert b.l2_bound(ascending(sizes), capacity) == slow_l2(sizes, capacity)


@given(st.lists(st.integers(1, 60) | st.sampled_from([12, 15, 20, 24, 30, 36, 40, 45, 48]), max_size=40), st.data())
def test_the_dual_bound_matches_its_definition(sizes: list[int], data: st.DataObject) -> None:
    """Sizes are counted by thresholds; one that divides the capacity counts as itself."""
    capacity = data.draw(st.sampled_from([60, 61, 62, 63]))
    assert b.dual_bound(ascending(sizes), capacity) == slow_dual(sizes, capacity)


@given(st.lists(st.integers(1, CAPACITY), max_size=30), st.permutations(range(30)))
def test_order_does_not_matter(sizes: list[int], order: list[int]) -> None:
    """The bound belongs to the set of requests, not to how they are listed."""
    shuffled = [sizes[index] for index in order if index < len(sizes)]
    assert bound(sizes) == bound(shuffled)


@given(st.lists(st.integers(1, CAPACITY), max_size=30), st.integers(1, CAPACITY))
def test_one_more_request_never_lowers_a_bound(sizes: list[int], one_more: int) -> None:
    """A bound that falls when load rises cannot be one."""
    assert bound(sizes) <= bound([*sizes, one_more])


def test_requests_just_above_a_third_need_more_workers_than_their_bytes() -> None:
    """Seven requests of C/3 and a little need four workers, though they weigh two and a half."""
    assert bound([9] * 7) == 4


def test_an_empty_cluster_needs_no_worker() -> None:
    """The ratio's denominator starts at zero, not at one; preempted requests hold nothing."""
    assert bound([]) == bound([0, 0, 0]) == 0
