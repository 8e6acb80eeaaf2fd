"""Lower bounds for bin packing: the fewest workers that could hold a set of requests at one instant.

Works on sizes alone, not on where requests are placed: no schedule, with or without migration, can use fewer workers at
that instant than these bounds.

All workers are alike and hold `capacity` bytes.  Sizes are whole bytes in (0, capacity].

    volume    sum / capacity, rounded up
    l2        Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990)
    dual      the dual feasible functions u(k) of Fekete and Schepers, "New classes of fast lower bounds for bin
              packing problems" (2001), for k = 2, 3, 4: of requests above C/(k+1) at most k share a worker
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
_DUAL_PARTS = (2, 3, 4)


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


def volume_bound(ascending: Sizes, capacity: int) -> int:
    """Return the workers for the total bytes, as if requests could be split."""
    return _ceil_div(int(ascending.sum()), capacity)


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


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
