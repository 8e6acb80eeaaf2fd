"""Packing: chooses which of the moves that share bins go now, each by KV over a path or by tokens.

Owns the filter of ways and the packing.  Knows nothing of time, requests or workers: a
move is its ways, a way is a cost and the bins that it draws from: one bin for tokens, every segment of the path for KV.

In one epoch the moves draw at most its boundary from each bin.  A way that costs more than its narrowest bin allows
draws that bin's whole boundary in several epochs, so nothing else may use the bin then (`planner` books them).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from melld.migrate.snapshot import Via

Bin = tuple[str, ...]
"""Kind and owner of a bin: see `paths`."""


class Way(msgspec.Struct, frozen=True):
    """A way for a move to go.  `epochs`: its time alone; the shortest is tried first.

    Its first bin gives the kind: a link, or tokens.
    """

    bins: tuple[Bin, ...]
    cost: int
    epochs: float

    @property
    def via(self) -> Via:
        """Return its kind."""
        return Via(self.bins[0][0])


class Candidate(msgspec.Struct, frozen=True):
    """A move to pack: its ways (none: it cannot go now).  `pressing`: it cannot wait."""

    ways: tuple[Way, ...]
    pressing: bool


Choice = tuple[Way | None, ...]
"""The way of each candidate; None: it waits."""


class Bins:
    """Fill levels of the bins.  `boundary`: a bin's capacity in an epoch."""

    def __init__(self, boundary: Callable[[Bin], int], used: Mapping[Bin, int], closed: Iterable[Bin] = ()) -> None:
        self.boundary = boundary
        self._used = dict(used)
        self._closed = frozenset(closed)

    def fits(self, way: Way) -> bool:
        """Return True if the way's bins have room for it now."""
        return not self.full(way)

    def full(self, way: Way) -> list[Bin]:
        """Return the way's bins that have no room for it now."""
        draw, used = self.draw(way), self._used
        return [one for one in way.bins if one in self._closed or used.get(one, 0) + draw > self.boundary(one)]

    def draw(self, way: Way) -> int:
        """Return what the way takes from each of its bins in an epoch: its cost, or the narrowest bin's boundary."""
        return min(way.cost, *map(self.boundary, way.bins))

    def take(self, way: Way) -> None:
        """Book the way in its bins."""
        draw = self.draw(way)
        for one in way.bins:
            self._used[one] = self._used.get(one, 0) + draw

    def copy(self) -> "Bins":
        """Return a copy for a trial."""
        return Bins(self.boundary, self._used, self._closed)


SLACK_EPOCHS = 1.0
"""A way that ends at most this much later is still worth taking: it may spare another move the wait for an epoch."""


class Waits:
    """Estimates of how long bins stay full; `owed`: bookings of each in later epochs.  Call in order of urgency.

    Filters the ways that are worth taking now: drops a way that would end later than waiting for another one.  A much
    slower way is better than waiting only if the faster way's bin stays full for long.  Without this a slow bin, free
    because no move should use it, would be filled first.
    """

    def __init__(self, bins: Bins, owed: Mapping[Bin, int]) -> None:
        self._bins = bins.copy()
        self._owed = dict(owed)

    def sensible(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the ways worth taking, and book its best one ahead of later calls."""
        if not candidate.ways:
            return candidate
        ends = [(self._epochs_until_room(way) + way.epochs, way) for way in candidate.ways]
        end, best = min(ends, key=lambda pair: pair[0])
        self._book(best)
        ways = tuple(way for way_end, way in ends if way_end <= end + SLACK_EPOCHS)
        return msgspec.structs.replace(candidate, ways=ways)

    def _epochs_until_room(self, way: Way) -> int:
        """Return 0 if there is room now, else the wait.  A move that outlasts its booking may lengthen it."""
        draw, boundary = self._bins.draw(way), self._bins.boundary
        return max((-(-(self._owed.get(one, 0) + draw) // boundary(one)) for one in self._bins.full(way)), default=0)

    def _book(self, way: Way) -> None:
        owed = way.cost
        if self._bins.fits(way):
            self._bins.take(way)
            owed -= self._bins.draw(way)
        for one in way.bins:
            self._owed[one] = self._owed.get(one, 0) + owed


def divide(candidates: Sequence[Candidate], bins: Bins) -> Choice:
    """Return which candidates go now: pressing ones first, in order of urgency, each by the shortest way that fits.

    No waiting candidate would fit beside those that go.  `bins` are not changed.
    """
    bins = bins.copy()
    chosen: list[Way | None] = [None] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda index: not candidates[index].pressing):
        ways = sorted(candidates[index].ways, key=lambda way: way.epochs)
        if (way := next(filter(bins.fits, ways), None)) is not None:
            bins.take(way)
            chosen[index] = way
    return tuple(chosen)
