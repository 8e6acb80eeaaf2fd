"""Move planner: decides for all workers together which moves start now, by KV or by tokens, and which wait.

Owns the waiting moves and the bookings of those under way.  Pure: no clock, no I/O; the simulator and the daemon run
the same class.

    MoveRequest ──ask──► waiting ──epoch / at_once──► migration ──ended──► the bins are free again
                            └──── given up: it has waited too long, the scheduler may decide again

Bins: a destination holds tokens of foreign prefill; each link, port and network on the path of a copy
holds bytes, and a move draws from all of them (the paper's global consensus).  A way that would end later than another
one that the move must wait for is left out first (`packing.Waits`).

**Boundaries.**  In each epoch a bin is booked for at most its boundary.  A move that costs more than its narrowest bin
allows is paced: `per_epoch` limits it, and the bin is booked whole for as many epochs as the move needs.  A move that
outlasts its booking keeps its place.

**No starvation.**  Moves that have waited for `patience` epochs go first, the longest wait first; if even the first
fits nowhere, its bins are closed to all others until it goes.  So it waits only for moves under way in its bins and for
moves that share bins with it and ran out of patience earlier.
"""

from collections.abc import Mapping, Sequence

import msgspec

from melld.ids import RequestId, WorkerId
from melld.migrate import paths
from melld.migrate.boundaries import Boundaries
from melld.migrate.packing import Bin, Bins, Candidate, Waits, Way, divide
from melld.migrate.snapshot import Via
from melld.migrate.wish import Cause, Wish


class PlannerSettings(msgspec.Struct, frozen=True):
    """Times in epochs.  `pressing`: a source that overflows within it cannot wait.  `patience`: see the module.

    `give_up`: a move that has waited that long is outdated.
    """

    pressing: float = 2.0
    patience: int = 10
    give_up: int = 300


class Plan(msgspec.Struct, frozen=True):
    """An epoch's decision.  Moves given up are dropped: the scheduler must hear of them."""

    starts: tuple[Wish, ...] = ()
    given_up: tuple[Wish, ...] = ()


class Planner:
    """Planner of one fleet's moves.  `waiting` is in order of request."""

    def __init__(self, boundaries: Boundaries, settings: PlannerSettings | None = None) -> None:
        self.boundaries = boundaries
        self.settings = settings or PlannerSettings()
        self.waiting: dict[RequestId, Wish] = {}
        self._begun: list[Wish] = []
        self._batches: Mapping[WorkerId, int] = {}
        self._limits: dict[Bin, int] = {}  # the boundaries, beside these batches, that were asked for
        self._used: dict[Bin, int] = {}
        self._closed: dict[Bin, RequestId] = {}  # the move that each bin is kept for

    @property
    def is_idle(self) -> bool:
        """Return True if no move waits or is under way."""
        return not self.waiting and not self._begun

    def respect(self, boundaries: Boundaries) -> None:
        """Plan within these boundaries from now on."""
        self.boundaries, self._limits = boundaries, {}

    # -- asked for ---------------------------------------------------------------------------------------------------

    def ask(self, wish: Wish, now_s: float) -> None:
        """Add a move; it replaces an earlier one of the same request."""
        wish.since_s = now_s
        self.waiting.pop(wish.request, None)
        self.waiting[wish.request] = wish

    def drop(self, request: RequestId) -> Wish | None:
        """Drop a waiting move; return it, or None if it did not wait."""
        return self.waiting.pop(request, None)

    def drop_worker(self, worker: WorkerId) -> list[Wish]:
        """Drop and return the waiting moves from and to a lost worker."""
        gone = [wish for wish in self.waiting.values() if worker in wish.link]
        for wish in gone:
            del self.waiting[wish.request]
        return gone

    def ended(self, request: RequestId) -> None:
        """Note that the request's migration has ended, for whatever reason.  This epoch's booking stays."""
        for wish in self._begun:
            if wish.request == request:
                wish.has_ended = True

    # -- decided -----------------------------------------------------------------------------------------------------

    def is_pressing(self, wish: Wish) -> bool:
        """Return True if the move cannot wait."""
        urgent = wish.urgency_s <= self.settings.pressing * self.boundaries.epoch_s
        return urgent or wish.asked or wish.epochs >= self.settings.patience

    def first_way(self, wish: Wish) -> Via:
        """Return the shortest way, as if all bins were free."""
        ways = self._candidate(wish).ways
        return min(ways, key=lambda way: way.epochs).via if ways else Via.KV

    def per_epoch(self, wish: Wish, via: Via) -> int:
        """Return how many bytes or tokens of the move this way allows in an epoch."""
        return min(map(self._boundary, self._bins_of(wish, via)))

    def at_once(self, request: RequestId, batches: Mapping[WorkerId, int]) -> Wish | None:
        """Start a waiting move between two epochs if it cannot wait and this epoch still has room."""
        wish = self.waiting[request]
        if not self.is_pressing(wish):
            return None
        self._batches, self._limits = batches, {}
        (way,) = divide(self._candidates([wish]), self._bins())
        if way is None:
            wish.waits_for = self._why(wish, self._bins())
            return None
        return self._start(wish, way)

    def epoch(self, batches: Mapping[WorkerId, int]) -> Plan:
        """Start an epoch and plan all waiting moves.  `batches`: requests that decode on each worker now."""
        self._turn(batches)
        starts: list[Wish] = []
        ready = sorted((wish for wish in self.waiting.values() if wish.ways), key=self._order)
        for elder in [wish for wish in ready if wish.epochs >= self.settings.patience]:
            starts += self._eldest(elder)
        rest = [wish for wish in ready if wish.request in self.waiting]
        choice = divide(self._candidates(rest), self._bins())
        starts += [self._start(wish, way) for wish, way in zip(rest, choice, strict=True) if way is not None]
        given_up = tuple(wish for wish in self.waiting.values() if wish.epochs >= self.settings.give_up)
        for wish in given_up:
            del self.waiting[wish.request]
        bins = self._bins()
        for wish in self.waiting.values():
            wish.waits_for, wish.epochs = self._why(wish, bins), wish.epochs + 1
        return Plan(tuple(starts), given_up)

    def _order(self, wish: Wish) -> tuple[int, float]:
        """Return the sort key: moves out of patience first, the longest wait first, then by urgency."""
        if wish.epochs >= self.settings.patience:
            return -wish.epochs, 0.0
        return 0, wish.urgency_s

    def _eldest(self, wish: Wish) -> list[Wish]:
        """Start a move that is out of patience, or close its bins to all others, unless they are kept for an elder."""
        (candidate,) = self._candidates([wish])
        (way,) = divide([candidate], self._bins())
        if way is not None:
            return [self._start(wish, way)]
        bins = {name for way in candidate.ways for name in way.bins}
        if not bins & self._closed.keys():
            self._closed.update(dict.fromkeys(bins, wish.request))
        return []

    # -- the book ----------------------------------------------------------------------------------------------------

    def _turn(self, batches: Mapping[WorkerId, int]) -> None:
        """Begin a new epoch and book the share of each move under way."""
        self._batches, self._limits, self._used, self._closed = batches, {}, {}, {}
        self._begun = [wish for wish in self._begun if wish.unpaid > 0 or not wish.has_ended]
        for wish in self._begun:
            self._book(wish)

    def _start(self, wish: Wish, way: Way) -> Wish:
        del self.waiting[wish.request]
        wish.way, wish.unpaid = way, way.cost
        self._book(wish)
        self._begun.append(wish)
        return wish

    def _book(self, wish: Wish) -> None:
        """Book what the move draws in this epoch: what is left of its cost, or all of it again once it is late."""
        assert wish.way is not None
        draw = min(wish.unpaid or wish.way.cost, *map(self._boundary, wish.way.bins))
        wish.unpaid = max(wish.unpaid - draw, 0)
        for name in wish.way.bins:
            self._used[name] = self._used.get(name, 0) + draw

    def _why(self, wish: Wish, bins: Bins) -> Cause:
        """Return why the move waits."""
        ways = self._candidate(wish).ways
        full = {way.via: bins.full(way) for way in ways if not bins.fits(way)}
        if not ways:
            return Cause.NO_WAY
        if any(self._closed.get(name, wish.request) != wish.request for way in ways for name in way.bins):
            return Cause.ELDER
        if len(full) == 2:
            return Cause.BOTH
        if Via.KV in full:
            return Cause.LINK if full[Via.KV][0][0] == Via.KV else Cause.SHARED
        return Cause.COMPUTE if full else Cause.EPOCH

    def _bins(self) -> Bins:
        return Bins(self._boundary, self._used, self._closed)

    def _boundary(self, name: Bin) -> int:
        if name not in self._limits:
            self._limits[name] = paths.boundary(name, self.boundaries, self._batches)
        return self._limits[name]

    def _candidates(self, group: Sequence[Wish]) -> list[Candidate]:
        """Return the moves of a group, in order of urgency, with the ways that are worth taking now."""
        owed: dict[Bin, int] = {}
        for wish in self._begun:
            for name in wish.way.bins if wish.way is not None else ():
                owed[name] = owed.get(name, 0) + wish.unpaid
        waits = Waits(self._bins(), owed)
        return [waits.sensible(self._candidate(wish)) for wish in group]

    def _candidate(self, wish: Wish) -> Candidate:
        ways = []
        for via, cost in ((Via.KV, wish.kv_bytes), (Via.TOKENS, wish.tokens)):
            if via in wish.ways:
                bins = self._bins_of(wish, via)
                ways.append(Way(bins, cost, cost / min(map(self._boundary, bins))))
        return Candidate(tuple(ways), self.is_pressing(wish))

    def _bins_of(self, wish: Wish, via: Via) -> tuple[Bin, ...]:
        if via is Via.TOKENS:
            return paths.compute(wish.destination)
        return paths.path(self.boundaries, *wish.link)
