"""Move planner: decides for all workers together which moves start now, by KV or by tokens, and which wait.

Owns the waiting moves and the bookings of those under way.  Pure: no clock, no I/O; the simulator and the daemon run
the same class.

    MoveRequest ──ask──► waiting ──epoch / at_once──► Start(via) ──► migration ──ended──► the bins are free again
                            └──── given up: it has waited too long, the scheduler may decide again

Bins: a destination holds tokens of foreign prefill; each link, port and network on the path of a copy
holds bytes, and a move draws from all of them (the paper's global consensus).  A way that would end later than another
one that the move must wait for is left out first (`packing.Waits`).

**Boundaries.**  In each epoch a bin is booked for at most its boundary.  A move that costs more than its narrowest bin
allows is paced: `Start.per_epoch` limits it, and the bin is booked whole for as many epochs as the move needs.  A move
that outlasts its booking keeps its place.

**No starvation.**  Moves that have waited for `patience` epochs go first, the longest wait first; if even the first
fits nowhere, its bins are closed to all others until it goes.  So it waits only for moves under way in its bins and for
moves that share bins with it and ran out of patience earlier.
"""

import enum
import math
from collections.abc import Mapping, Sequence

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate import paths
from melld.migrate.boundaries import Boundaries
from melld.migrate.packing import Bin, Bins, Candidate, Waits, Way, divide
from melld.migrate.snapshot import Via


class PlannerSettings(msgspec.Struct, frozen=True):
    """Times in epochs.  `pressing`: a source that overflows within it cannot wait.  `patience`: see the module.

    `give_up`: a move that has waited that long is outdated.
    """

    pressing: float = 2.0
    patience: int = 10
    give_up: int = 300


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A wanted move.  `asked`: by an operator, who waits for it.  `after_first_token`: see `migration.Wish`.

    `ways`: those that its request, link and destination allow now; the move waits while there are none.
    """

    request: RequestId
    source: WorkerId
    destination: WorkerId
    kv_bytes: int
    tokens: int
    urgency_s: float = math.inf
    ways: tuple[Via, ...] = (Via.KV, Via.TOKENS)
    asked: bool = False
    after_first_token: bool = False
    cause: EventId = NO_EVENT
    """The event on which the move was decided."""


class Start(msgspec.Struct, frozen=True):
    """A move that begins now by this way.  `per_epoch`: its limit in bytes or tokens per epoch."""

    wanted: Wanted
    via: Via
    per_epoch: int


class Cause(enum.StrEnum):
    """Why a move waits."""

    EPOCH = "the next epoch has not begun"
    LINK = "the link is full"
    SHARED = "other moves fill a segment that its link shares"
    COMPUTE = "the destination's budget for foreign prefill is used up"
    BOTH = "the link is full, and the destination's budget for foreign prefill is used up"
    ELDER = "another move has waited longer"
    NO_WAY = "the destination is not ready"


class Deferred(msgspec.Struct, frozen=True):
    """A move that has waited since `since_s`, for `epochs` epochs."""

    wanted: Wanted
    since_s: float
    cause: Cause = Cause.EPOCH
    epochs: int = 0


class Plan(msgspec.Struct, frozen=True):
    """An epoch's decision.  Moves given up are dropped: the scheduler must hear of them."""

    starts: tuple[Start, ...] = ()
    given_up: tuple[Deferred, ...] = ()


class _Flight(msgspec.Struct):
    """A move under way; `unpaid`: the part of its cost left for later epochs."""

    way: Way
    unpaid: int
    ended: bool = False


class Planner:
    """Planner of one fleet's moves.  `waiting` is in order of request."""

    def __init__(self, boundaries: Boundaries, settings: PlannerSettings | None = None) -> None:
        self.boundaries = boundaries
        self.settings = settings or PlannerSettings()
        self.waiting: dict[RequestId, Deferred] = {}
        self._flights: list[tuple[RequestId, _Flight]] = []
        self._batches: Mapping[WorkerId, int] = {}
        self._limits: dict[Bin, int] = {}  # the boundaries, beside these batches, that were asked for
        self._used: dict[Bin, int] = {}
        self._closed: dict[Bin, RequestId] = {}  # the move that each bin is kept for

    @property
    def is_idle(self) -> bool:
        """Return True if no move waits or is under way."""
        return not self.waiting and not self._flights

    def respect(self, boundaries: Boundaries) -> None:
        """Plan within these boundaries from now on."""
        self.boundaries, self._limits = boundaries, {}

    # -- asked for ---------------------------------------------------------------------------------------------------

    def ask(self, wanted: Wanted, now_s: float) -> None:
        """Add a move; it replaces an earlier one of the same request."""
        self.waiting.pop(wanted.request, None)
        self.waiting[wanted.request] = Deferred(wanted, now_s)

    def resize(self, request: RequestId, kv_bytes: int, tokens: int, ways: tuple[Via, ...]) -> None:
        """Update the size and the open ways of a waiting move."""
        deferred = self.waiting[request]
        wanted = msgspec.structs.replace(deferred.wanted, kv_bytes=kv_bytes, tokens=tokens, ways=ways)
        self.waiting[request] = msgspec.structs.replace(deferred, wanted=wanted)

    def drop(self, request: RequestId) -> Deferred | None:
        """Drop a waiting move; return it, or None if it did not wait."""
        return self.waiting.pop(request, None)

    def drop_worker(self, worker: WorkerId) -> list[Deferred]:
        """Drop and return the waiting moves from and to a lost worker."""
        gone = [d for d in self.waiting.values() if worker in (d.wanted.source, d.wanted.destination)]
        for deferred in gone:
            del self.waiting[deferred.wanted.request]
        return gone

    def ended(self, request: RequestId) -> None:
        """Note that the request's migration has ended, for whatever reason.  This epoch's booking stays."""
        for name, flight in self._flights:
            if name == request:
                flight.ended = True

    # -- decided -----------------------------------------------------------------------------------------------------

    def is_pressing(self, deferred: Deferred) -> bool:
        """Return True if the move cannot wait."""
        wanted, settings = deferred.wanted, self.settings
        urgent = wanted.urgency_s <= settings.pressing * self.boundaries.epoch_s
        return urgent or wanted.asked or deferred.epochs >= settings.patience

    def first_way(self, wanted: Wanted) -> Via:
        """Return the shortest way, as if all bins were free."""
        ways = self._candidate(Deferred(wanted, 0.0)).ways
        return _via(min(ways, key=lambda way: way.epochs)) if ways else Via.KV

    def per_epoch(self, wanted: Wanted, via: Via) -> int:
        """Return how many bytes or tokens of the move this way allows in an epoch."""
        return min(map(self._boundary, self._bins_of(wanted, via)))

    def at_once(self, request: RequestId, batches: Mapping[WorkerId, int]) -> Start | None:
        """Start a waiting move between two epochs if it cannot wait and this epoch still has room."""
        deferred = self.waiting[request]
        if not self.is_pressing(deferred):
            return None
        self._batches, self._limits = batches, {}
        (way,) = divide(self._candidates([deferred]), self._bins())
        if way is None:
            self._note(deferred, deferred.epochs, self._bins())
            return None
        return self._start(deferred, way)

    def epoch(self, batches: Mapping[WorkerId, int]) -> Plan:
        """Start an epoch and plan all waiting moves.  `batches`: requests that decode on each worker now."""
        self._turn(batches)
        starts: list[Start] = []
        ready = sorted((one for one in self.waiting.values() if one.wanted.ways), key=self._order)
        for elder in [one for one in ready if one.epochs >= self.settings.patience]:
            starts += self._eldest(elder)
        rest = [one for one in ready if one.wanted.request in self.waiting]
        choice = divide(self._candidates(rest), self._bins())
        starts += [self._start(d, way) for d, way in zip(rest, choice, strict=True) if way is not None]
        given_up = tuple(d for d in self.waiting.values() if d.epochs >= self.settings.give_up)
        for deferred in given_up:
            del self.waiting[deferred.wanted.request]
        bins = self._bins()
        for deferred in list(self.waiting.values()):
            self._note(deferred, deferred.epochs + 1, bins)
        return Plan(tuple(starts), given_up)

    def _order(self, deferred: Deferred) -> tuple[int, float]:
        """Return the sort key: moves out of patience first, the longest wait first, then by urgency."""
        if deferred.epochs >= self.settings.patience:
            return -deferred.epochs, 0.0
        return 0, deferred.wanted.urgency_s

    def _eldest(self, deferred: Deferred) -> list[Start]:
        """Start a move that is out of patience, or close its bins to all others, unless they are kept for an elder."""
        (candidate,) = self._candidates([deferred])
        (way,) = divide([candidate], self._bins())
        if way is not None:
            return [self._start(deferred, way)]
        bins = {name for way in candidate.ways for name in way.bins}
        if not bins & self._closed.keys():
            self._closed.update(dict.fromkeys(bins, deferred.wanted.request))
        return []

    # -- the book ----------------------------------------------------------------------------------------------------

    def _turn(self, batches: Mapping[WorkerId, int]) -> None:
        """Begin a new epoch and book the share of each move under way."""
        self._batches, self._limits, self._used, self._closed = batches, {}, {}, {}
        self._flights = [entry for entry in self._flights if entry[1].unpaid > 0 or not entry[1].ended]
        for _, flight in self._flights:
            draw = min(flight.unpaid or flight.way.cost, self._narrowest(flight.way))
            flight.unpaid = max(flight.unpaid - draw, 0)
            self._book(flight.way, draw)

    def _start(self, deferred: Deferred, way: Way) -> Start:
        wanted = deferred.wanted
        del self.waiting[wanted.request]
        per_epoch = self._narrowest(way)
        draw = min(way.cost, per_epoch)
        self._book(way, draw)
        self._flights.append((wanted.request, _Flight(way, way.cost - draw)))
        return Start(wanted, _via(way), per_epoch)

    def _book(self, way: Way, draw: int) -> None:
        for name in way.bins:
            self._used[name] = self._used.get(name, 0) + draw

    def _narrowest(self, way: Way) -> int:
        return min(map(self._boundary, way.bins))

    def _note(self, deferred: Deferred, epochs: int, bins: Bins) -> None:
        """Record why the move waits."""
        request, ways = deferred.wanted.request, self._candidate(deferred).ways
        full = {_via(way): bins.full(way) for way in ways if not bins.fits(way)}
        if not ways:
            cause = Cause.NO_WAY
        elif any(self._closed.get(name, request) != request for way in ways for name in way.bins):
            cause = Cause.ELDER
        elif len(full) == 2:
            cause = Cause.BOTH
        elif Via.KV in full:
            cause = Cause.LINK if full[Via.KV][0][0] == Via.KV else Cause.SHARED
        else:
            cause = Cause.COMPUTE if full else Cause.EPOCH
        self.waiting[request] = msgspec.structs.replace(deferred, cause=cause, epochs=epochs)

    def _bins(self) -> Bins:
        return Bins(self._boundary, self._used, self._closed)

    def _boundary(self, name: Bin) -> int:
        if name not in self._limits:
            self._limits[name] = paths.boundary(name, self.boundaries, self._batches)
        return self._limits[name]

    def _candidates(self, group: Sequence[Deferred]) -> list[Candidate]:
        """Return the moves of a group, in order of urgency, with the ways that are worth taking now."""
        owed: dict[Bin, int] = {}
        for _, flight in self._flights:
            for name in flight.way.bins:
                owed[name] = owed.get(name, 0) + flight.unpaid
        waits = Waits(self._bins(), owed)
        return [waits.sensible(self._candidate(deferred)) for deferred in group]

    def _candidate(self, deferred: Deferred) -> Candidate:
        wanted, ways = deferred.wanted, []
        for via, cost in ((Via.KV, wanted.kv_bytes), (Via.TOKENS, wanted.tokens)):
            if via in wanted.ways:
                bins = self._bins_of(wanted, via)
                ways.append(Way(bins, cost, cost / min(map(self._boundary, bins))))
        return Candidate(tuple(ways), self.is_pressing(deferred))

    def _bins_of(self, wanted: Wanted, via: Via) -> tuple[Bin, ...]:
        if via is Via.TOKENS:
            return paths.compute(wanted.destination)
        return paths.path(self.boundaries, wanted.source, wanted.destination)


def _via(way: Way) -> Via:
    return Via(way.bins[0][0])
