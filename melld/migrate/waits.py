"""Filter of ways that are worth taking now: drops a way that would end later than waiting for another one.

Owns the estimate of how long a bin stays full, from its bookings.  Never packs: `packing` does that with the ways that
are left.

A much slower way is better than waiting only if the faster way's bin stays full for long.  Without this filter a slow
bin, free because no move should use it, would be filled first.
"""

from collections.abc import Mapping

import msgspec

from melld.migrate.packing import Bin, Bins, Candidate, Way

SLACK_EPOCHS = 1.0
"""A way that ends at most this much later is still worth taking: it may spare another move the wait for an epoch."""


class Waits:
    """Estimates of waits.  `owed`: bookings of each bin in later epochs.  Call in order of urgency."""

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
