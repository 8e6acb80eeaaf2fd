"""Lower bounds for bin packing: how few workers could hold a set of requests at one instant.

Works on sizes alone, not on where requests are placed: no schedule, with or without migration, can use fewer workers at
that instant than these bounds.

All workers are alike and hold `capacity` bytes.  Sizes are whole bytes in (0, capacity].

    volume    sum / capacity, rounded up
    counting  at most one L, two of L and M, three of L, M and S share a worker (the paper's classes)
    l2        Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990)
    dual      the dual feasible functions u(k) of Fekete and Schepers, "New classes of fast lower bounds for bin
              packing problems" (2001), for k = 2, 3, 4: a finer counting
    exact     branch and bound, for small sets and up to a limit of nodes
"""

import functools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
_DUAL_PARTS = (2, 3, 4)


class Bounds(msgspec.Struct, frozen=True):
    """Least numbers of workers; `exact` is None if the search was not asked for or hit its limit."""

    volume: int
    counting: int
    l2: int
    dual: int
    exact: int | None = None

    @property
    def best(self) -> int:
        """Return the greatest bound, hence the tightest."""
        return max(self.volume, self.counting, self.l2, self.dual, self.exact or 0)


def bounds(sizes: Iterable[int], capacity: int, node_limit: int = 0) -> Bounds:
    """Return all bounds of one set of sizes; the exact search is tried if `node_limit` is above zero.

    Raises:
        ValueError: a size is not in (0, capacity].
    """
    ascending = sorted_sizes(sizes, capacity)
    found = Bounds(
        volume=volume_bound(ascending, capacity),
        counting=counting_bound(ascending, capacity),
        l2=l2_bound(ascending, capacity),
        dual=dual_bound(ascending, capacity),
    )
    if node_limit <= 0:
        return found
    exact = exact_workers(ascending.tolist(), capacity, node_limit, at_least=found.best)
    return msgspec.structs.replace(found, exact=exact)


def lower_bound(sizes: Sizes, capacity: int) -> int:
    """Return the best of the O(n log n) bounds; the simulator evaluates it in every epoch.

    Sizes of zero (preempted requests that hold nothing) are left out.
    """
    ascending = sizes.copy()
    ascending.sort()
    if ascending.size and not ascending[0]:
        ascending = ascending[ascending.searchsorted(1) :]
    if not ascending.size:
        return 0
    # l2 with alpha = 0 is the volume bound; u(2) and u(3) are at least the counting of L, M and S.
    return max(l2_bound(ascending, capacity), dual_bound(ascending, capacity))


def sorted_sizes(sizes: Iterable[int], capacity: int) -> Sizes:
    """Return the sizes in ascending order, shape [n].

    Raises:
        ValueError: a size is not in (0, capacity].
    """
    ascending = np.sort(np.fromiter(sizes, dtype=np.int64))
    if ascending.size and (ascending[0] <= 0 or ascending[-1] > capacity):
        raise ValueError(f"sizes must lie in (0, {capacity}]: found {ascending[0]} to {ascending[-1]}")
    return ascending


def volume_bound(ascending: Sizes, capacity: int) -> int:
    """Return the workers for the total bytes, as if requests could be split."""
    return _ceil_div(int(ascending.sum()), capacity)


def counting_bound(ascending: Sizes, capacity: int) -> int:
    """Return the bound by counting: a worker holds at most one request above C/2, two above C/3, three above C/4."""
    return max(
        _ceil_div(ascending.size - int(np.searchsorted(ascending, capacity // parts, side="right")), parts - 1)
        for parts in (2, 3, 4)
    )


def l2_bound(ascending: Sizes, capacity: int) -> int:
    """Return Martello and Toth's L2 over every alpha that can matter, in O(n) for sorted sizes of shape [n].

    For a given alpha, requests above C - alpha are alone, requests above C/2 are apart from each other, and requests
    of at least alpha must use the room that the latter leave.  As alpha rises fewer requests count, so only the least
    alphas matter at which one more large request is alone; and zero, which is the volume bound.
    """
    half = int(ascending.searchsorted(capacity // 2, side="right"))
    volume = volume_bound(ascending, capacity)
    if half == ascending.size:
        return volume
    small, large = ascending[:half], ascending[half:]
    small_bytes = np.concatenate((small[::-1].cumsum()[::-1], [0]))  # from each small one on
    counted_bytes = small_bytes[small.searchsorted(capacity - large, side="right")]
    rooms = capacity - large
    more_bytes = counted_bytes - (rooms.cumsum() - rooms)  # beside those before the first that is alone
    return max(volume, large.size + _ceil_div(max(0, int(more_bytes.max())), capacity))


def dual_bound(ascending: Sizes, capacity: int) -> int:
    """Return the best of Fekete and Schepers' u(k): x counts floor((k+1)x)/k, or x itself where (k+1)x is whole."""
    steps, thresholds = _dual_steps(capacity)
    below = ascending.searchsorted(thresholds).tolist()
    weights = dict.fromkeys(_DUAL_PARTS, 0)
    for (parts, whole_bytes), reach, exceed in zip(steps, below[::2], below[1::2], strict=True):
        weights[parts] += capacity * (ascending.size - reach) - whole_bytes * (exceed - reach)
    return max(_ceil_div(weight, parts * capacity) for parts, weight in weights.items())


@functools.lru_cache
def _dual_steps(capacity: int) -> tuple[Sequence[tuple[int, int]], Sizes]:
    """Return where each u(k) rises: k with the size x at which (k+1)x is whole, zero if there is none, shape [steps].

    The second array alternates the least size that counts more and the one above it, shape [2 x steps].
    """
    steps: list[tuple[int, int]] = []
    thresholds: list[int] = []
    for parts in _DUAL_PARTS:
        for count in range(1, parts + 2):
            least, rest = _ceil_div(count * capacity, parts + 1), count * capacity % (parts + 1)
            steps.append((parts, 0 if rest else least))
            thresholds += least, least + 1
    return steps, np.array(thresholds, dtype=np.int64)


def first_fit_decreasing(sizes: Iterable[int], capacity: int) -> int:
    """Return the number of workers that first fit uses, largest first: an upper bound."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        for index, room in enumerate(rooms):
            if size <= room:
                rooms[index] -= size
                break
        else:
            rooms.append(capacity - size)
    return len(rooms)


def exact_workers(sizes: Sequence[int], capacity: int, node_limit: int, at_least: int = 0) -> int | None:
    """Return the least number of workers that hold the sizes, or None after `node_limit` placements.

    The search starts from the known bound `at_least`.
    """
    descending = sorted(sizes, reverse=True)
    enough = first_fit_decreasing(descending, capacity)
    budget = [node_limit]
    for workers in range(max(at_least, 0), enough):
        fits = _fits(descending, [capacity] * workers, sum(descending), budget)
        if fits is None:
            return None
        if fits:
            return workers
    return enough


def _fits(descending: Sequence[int], rooms: list[int], left: int, budget: list[int], start: int = 0) -> bool | None:
    """Return True if the sizes from `start` fit in the rooms; None if the budget of placements is used up."""
    if start == len(descending):
        return True
    smallest = descending[-1]
    if left > sum(room for room in rooms if room >= smallest):
        return False
    size = descending[start]
    for room in sorted({room for room in rooms if room >= size}):
        if budget[0] == 0:
            return None
        budget[0] -= 1
        index = rooms.index(room)
        rooms[index] = room - size
        fits = _fits(descending, rooms, left - size, budget, start + 1)
        rooms[index] = room
        if fits is not False or room == size:
            return fits
    return False


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
