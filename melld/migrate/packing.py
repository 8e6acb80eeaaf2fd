"""Packing: which of the moves that share bins go now, each by its KV over a path or by its tokens.

Owns the greedy ways, the search and what "better" means.  Knows nothing of time, requests or workers: a move is its
ways, a way is a cost and the bins that it draws it from: one for tokens, every segment of the path for KV.

What goes in one epoch draws from each bin no more than its boundary.  A way that costs more than its narrowest bin
takes draws that bin's whole boundary in each of several epochs, so nothing else may be in it (`planner` books them).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

Bin = tuple[str, ...]
"""What it is, and whose: see `planner_paths`."""
FEW = 7
"""So many moves, and fewer, are divided in the best way that there is."""


class Way(msgspec.Struct, frozen=True):
    """One way for a move to go.  `epochs`: how long it takes alone; what is soonest over is tried first.

    The first of its bins says what it is: a link, or tokens.
    """

    bins: tuple[Bin, ...]
    cost: int
    epochs: float


class Candidate(msgspec.Struct, frozen=True):
    """A move: its ways (none: it cannot go now), and whether it cannot wait."""

    ways: tuple[Way, ...]
    pressing: bool


Choice = tuple[Way | None, ...]
"""For each candidate its way; None: not now."""


class Bins:
    """How full the bins are.  `boundary`: what a bin takes in an epoch."""

    def __init__(self, boundary: Callable[[Bin], int], used: Mapping[Bin, int], closed: Iterable[Bin] = ()) -> None:
        self.boundary = boundary
        self._used = dict(used)
        self._closed = frozenset(closed)

    def fits(self, way: Way) -> bool:
        """Whether the move could go this way now."""
        return not self.full(way)

    def full(self, way: Way) -> list[Bin]:
        """Those of its bins that keep it from going this way now."""
        draw, used = self.draw(way), self._used
        return [one for one in way.bins if one in self._closed or used.get(one, 0) + draw > self.boundary(one)]

    def draw(self, way: Way) -> int:
        """What it takes of each of its bins in one epoch: all of it, or what the narrowest of them carries."""
        return min(way.cost, *map(self.boundary, way.bins))

    def left(self, way: Way) -> float:
        """What part of its fullest bin would be left."""
        draw = self.draw(way)
        return min((self.boundary(one) - self._used.get(one, 0) - draw) / self.boundary(one) for one in way.bins)

    def take(self, way: Way) -> None:
        """It goes this way."""
        draw = self.draw(way)
        for one in way.bins:
            self._used[one] = self._used.get(one, 0) + draw

    def give_back(self, way: Way) -> None:
        """The opposite of `take`."""
        draw = self.draw(way)
        for one in way.bins:
            self._used[one] -= draw

    def copy(self) -> "Bins":
        """For a trial."""
        return Bins(self.boundary, self._used, self._closed)


def divide(candidates: Sequence[Candidate], bins: Bins) -> Choice:
    """The better of first fit and best fit; of `FEW` moves or fewer the best division that there is.

    Candidates come in order of urgency.  Better is: more of those that cannot wait; then more moves; then the more
    urgent ones; then less load, the sum of the epochs that they take by the ways chosen.  What is equal falls to first
    fit.  `bins` stay as they are.

    Each division is maximal: no candidate that is left out would fit beside those that go.  More is not promised of
    more than `FEW`: one large urgent move may keep out many small ones.
    """
    first = _greedy(candidates, bins.copy(), best_fit=False)
    best = _greedy(candidates, bins.copy(), best_fit=True)
    better = max(first, best, key=lambda choice: rank(candidates, choice))
    all_as_wished = all(way is not None and way is _soonest(one) for one, way in zip(candidates, better, strict=True))
    if not all_as_wished and 1 < len(candidates) <= FEW:
        return _Search(candidates, bins.copy(), better).best
    return better


Rank = tuple[int, int, tuple[bool, ...], float]


def rank(candidates: Sequence[Candidate], choice: Sequence[Way | None]) -> Rank:
    """The greater, the better: pressing moves that go, moves that go, which, and minus the epochs that they take."""
    goes = tuple(way is not None for way in choice)
    pressing = sum(candidate.pressing for candidate, go in zip(candidates, goes, strict=True) if go)
    epochs = sum(way.epochs for way in choice if way is not None)
    return pressing, sum(goes), goes, -round(epochs, 9)


def _soonest(candidate: Candidate) -> Way | None:
    return min(candidate.ways, key=lambda way: way.epochs, default=None)


def _greedy(candidates: Sequence[Candidate], bins: Bins, *, best_fit: bool) -> Choice:
    """Pressing ones first, each where it fits: where it is over soonest, or where the least is left (best fit)."""
    chosen: list[Way | None] = [None] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda index: not candidates[index].pressing):
        ways = sorted(candidates[index].ways, key=bins.left if best_fit else lambda way: way.epochs)
        way = next((way for way in ways if bins.fits(way)), None)
        if way is not None:
            bins.take(way)
            chosen[index] = way
    return tuple(chosen)


class _Search:
    """All divisions, but for those that cannot be better than the best so far (depth first, branch and bound)."""

    def __init__(self, candidates: Sequence[Candidate], bins: Bins, start: Choice) -> None:
        self.best = start
        self._candidates = candidates
        self._bins = bins
        self._rank = rank(candidates, start)
        self._chosen: list[Way | None] = []
        self._try(())

    def _try(self, goes: tuple[bool, ...]) -> None:
        """Go on from the candidates that have been decided."""
        rest = self._candidates[len(goes) :]
        if self._at_most(goes) <= self._rank:
            return
        if not rest:
            self.best, self._rank = tuple(self._chosen), rank(self._candidates, self._chosen)
            return
        for way in sorted(rest[0].ways, key=lambda way: way.epochs):
            if self._bins.fits(way):
                self._bins.take(way)
                self._chosen.append(way)
                self._try((*goes, True))
                self._chosen.pop()
                self._bins.give_back(way)
        self._chosen.append(None)
        self._try((*goes, False))
        self._chosen.pop()

    def _at_most(self, goes: tuple[bool, ...]) -> Rank:
        """The rank if all that are undecided went, and took no time."""
        all_go = (*goes, *(True for _ in self._candidates[len(goes) :]))
        pressing = sum(one.pressing for one, go in zip(self._candidates, all_go, strict=True) if go)
        epochs = sum(way.epochs for way in self._chosen if way is not None)
        return pressing, sum(all_go), all_go, -round(epochs, 9)
