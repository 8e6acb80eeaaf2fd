"""Which ways are worth taking now: none that is over later than another would be for which the move waits.

Owns the guess of how long a bin stays full, from what is booked in it.  Never divides: `planner_packing` does that
with the ways that are left.

A way that is much slower than the other one is better than nothing only if the other's bin stays full for long.
Without this a bin that is free because nobody should want it would be filled first of all.
"""

from collections.abc import Mapping

import msgspec

from melld.migrate.packing import Bin, Bins, Candidate, Way

SLACK_EPOCHS = 1.0
"""A way that is over by so much later is worth taking still: it may spare another move the wait for an epoch."""


class Waits:
    """`owed`: what is booked in each bin for the epochs that come.  To be asked in the order of urgency."""

    def __init__(self, bins: Bins, owed: Mapping[Bin, int]) -> None:
        self._bins = bins.copy()
        self._owed = dict(owed)

    def sensible(self, candidate: Candidate) -> Candidate:
        """The candidate with those of its ways that are worth taking; whoever is asked later comes after it."""
        if not candidate.ways:
            return candidate
        ends = [(self._epochs_until_room(way) + way.epochs, way) for way in candidate.ways]
        end, best = min(ends, key=lambda pair: pair[0])
        self._book(best)
        ways = tuple(way for way_end, way in ends if way_end <= end + SLACK_EPOCHS)
        return msgspec.structs.replace(candidate, ways=ways)

    def _epochs_until_room(self, way: Way) -> int:
        """0 if there is room now.  A move that has outlasted its booking may keep its bin full for longer."""
        draw, boundary = self._bins.draw(way), self._bins.boundary
        return max((-(-(self._owed.get(one, 0) + draw) // boundary(one)) for one in self._bins.full(way)), default=0)

    def _book(self, way: Way) -> None:
        owed = way.cost
        if self._bins.fits(way):
            self._bins.take(way)
            owed -= self._bins.draw(way)
        for one in way.bins:
            self._owed[one] = self._owed.get(one, 0) + owed
