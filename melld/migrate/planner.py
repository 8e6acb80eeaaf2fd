"""Which moves begin now, by KV or by tokens, and which wait: over all workers together, within the boundaries.

Owns the moves that wait and the book of what is on its way.  Pure: no clock, no I/O; the simulator and the daemon run
the same object.

    MoveRequest ──ask──► waiting ──epoch / at_once──► Start(via) ──► migration ──ended──► the bins are free again
                            └──── given up: it has waited for too long, the scheduler may decide anew

Bins: a destination holds tokens of foreign prefill; a link, a port, a switch and whatever else lies on the path of a
copy hold bytes, and a move takes of each of them (the paper's global consensus).  Moves that share no bin, not even by
way of others, are divided apart, which loses nothing (`planner_packing` divides).  A way that would be over later than
another that the move has to wait for is left out beforehand (`planner_waits`).

**Boundaries.**  In each epoch a bin is booked for at most its boundary.  A move that costs more than its narrowest bin
takes is paced: `Start.per_epoch` says how much of it may go in one, its bin is booked whole for as many epochs as it
needs, and nothing else may be in it.  A move that is not over when its booking is keeps its place.

**Nobody starves.**  A move that has waited for `patience` epochs goes before all that have not, the eldest first; where
even the eldest fits nowhere, the bins that it waits for are closed to all others until it goes.  So it waits for what
is on its way in one of its bins, and for those that share bins with it and have lost patience before it.
"""

import enum
import math
from collections.abc import Mapping, Sequence

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate import paths
from melld.migrate.boundaries import Boundaries
from melld.migrate.packing import Bin, Bins, Candidate, Way, divide
from melld.migrate.snapshot import Via
from melld.migrate.waits import Waits


class PlannerSettings(msgspec.Struct, frozen=True):
    """In epochs.  `pressing`: a source that overflows so soon cannot wait.  `patience`: see the module.

    `give_up`: a move that has waited so long was for a state of things that is past.
    """

    pressing: float = 2.0
    patience: int = 10
    give_up: int = 300


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A move that is wanted.  `asked`: by an operator, who waits for it.

    `ways`: what its request, its link and its destination allow now; while there is none, it waits.
    """

    request: RequestId
    source: WorkerId
    destination: WorkerId
    kv_bytes: int
    tokens: int
    urgency_s: float = math.inf
    ways: tuple[Via, ...] = (Via.KV, Via.TOKENS)
    asked: bool = False
    cause: EventId = NO_EVENT
    """The event on which the move was decided."""


class Start(msgspec.Struct, frozen=True):
    """The move begins now, this way.  `per_epoch`: the bytes, or tokens, of it that may go in one epoch."""

    wanted: Wanted
    via: Via
    per_epoch: int


class Cause(enum.StrEnum):
    """Why a move waits."""

    EPOCH = "it begins with the next epoch"
    LINK = "the link is taken"
    SHARED = "others take what its link shares with theirs"
    COMPUTE = "its destination computes as much for others as it may"
    BOTH = "the link is taken, and its destination computes as much for others as it may"
    ELDER = "another has waited longer"
    NO_WAY = "its destination is not ready"


class Deferred(msgspec.Struct, frozen=True):
    """A move that waits since `since_s`, for so many epochs."""

    wanted: Wanted
    since_s: float
    cause: Cause = Cause.EPOCH
    epochs: int = 0


class Plan(msgspec.Struct, frozen=True):
    """One epoch's decision.  Those given up wait no more: the scheduler must hear of them."""

    starts: tuple[Start, ...] = ()
    given_up: tuple[Deferred, ...] = ()


class _Flight(msgspec.Struct):
    """A move that has begun: `unpaid` of its cost falls to epochs that come."""

    way: Way
    unpaid: int
    ended: bool = False


class Planner:
    """All moves of one fleet.  `waiting` is in the order in which they were asked for."""

    def __init__(self, boundaries: Boundaries, settings: PlannerSettings | None = None) -> None:
        self.boundaries = boundaries
        self.settings = settings or PlannerSettings()
        self.waiting: dict[RequestId, Deferred] = {}
        self._flights: list[tuple[RequestId, _Flight]] = []
        self._batches: Mapping[WorkerId, int] = {}
        self._used: dict[Bin, int] = {}
        self._closed: dict[Bin, RequestId] = {}  # for whom

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and nothing is on its way."""
        return not self.waiting and not self._flights

    def respect(self, boundaries: Boundaries) -> None:
        """Plan within these boundaries from now on."""
        self.boundaries = boundaries

    # -- asked for ---------------------------------------------------------------------------------------------------

    def ask(self, wanted: Wanted, now_s: float) -> None:
        """Take a move in; one that was asked for before for the same request is forgotten."""
        self.waiting.pop(wanted.request, None)
        self.waiting[wanted.request] = Deferred(wanted, now_s)

    def resize(self, request: RequestId, kv_bytes: int, tokens: int, ways: tuple[Via, ...]) -> None:
        """A waiting move's request has grown, or the ways that are open to it are others now."""
        deferred = self.waiting[request]
        wanted = msgspec.structs.replace(deferred.wanted, kv_bytes=kv_bytes, tokens=tokens, ways=ways)
        self.waiting[request] = msgspec.structs.replace(deferred, wanted=wanted)

    def drop(self, request: RequestId) -> Deferred | None:
        """The move is not wanted any more; None if it did not wait."""
        return self.waiting.pop(request, None)

    def drop_worker(self, worker: WorkerId) -> list[Deferred]:
        """The worker is gone, and with it the moves from and to it that wait."""
        gone = [d for d in self.waiting.values() if worker in (d.wanted.source, d.wanted.destination)]
        for deferred in gone:
            del self.waiting[deferred.wanted.request]
        return gone

    def ended(self, request: RequestId) -> None:
        """Its migration has ended, in whatever way.  What is booked for this epoch stays booked."""
        for name, flight in self._flights:
            if name == request:
                flight.ended = True

    # -- decided -----------------------------------------------------------------------------------------------------

    def is_pressing(self, deferred: Deferred) -> bool:
        """Whether it cannot wait."""
        wanted, settings = deferred.wanted, self.settings
        urgent = wanted.urgency_s <= settings.pressing * self.boundaries.epoch_s
        return urgent or wanted.asked or deferred.epochs >= settings.patience

    def first_way(self, wanted: Wanted) -> Via:
        """How it goes if nothing stands in its way: as is soonest over."""
        ways = self._candidate(Deferred(wanted, 0.0)).ways
        return _via(min(ways, key=lambda way: way.epochs)) if ways else Via.KV

    def per_epoch(self, wanted: Wanted, via: Via) -> int:
        """What of it, in bytes or tokens, may go this way in one epoch."""
        return min(map(self._boundary, self._bins_of(wanted, via)))

    def at_once(self, request: RequestId, batches: Mapping[WorkerId, int]) -> Start | None:
        """Begin a waiting move between two epochs, if it cannot wait and what is left of this epoch allows."""
        deferred = self.waiting[request]
        if not self.is_pressing(deferred):
            return None
        self._batches = batches
        (way,) = divide(self._candidates([deferred]), self._bins())
        if way is None:
            self._note(deferred, deferred.epochs, self._bins())
            return None
        return self._start(deferred, way)

    def epoch(self, batches: Mapping[WorkerId, int]) -> Plan:
        """Begin an epoch and divide all that wait.  `batches`: requests that decode on each worker now."""
        self._turn(batches)
        starts: list[Start] = []
        ready = sorted((one for one in self.waiting.values() if one.wanted.ways), key=self._order)
        bins_of = [(one, [name for way in self._candidate(one).ways for name in way.bins]) for one in ready]
        for group in paths.together(bins_of):
            if group[0].epochs >= self.settings.patience:
                starts += self._eldest(group.pop(0))
            choice = divide(self._candidates(group), self._bins())
            starts += [self._start(d, way) for d, way in zip(group, choice, strict=True) if way is not None]
        given_up = tuple(d for d in self.waiting.values() if d.epochs >= self.settings.give_up)
        for deferred in given_up:
            del self.waiting[deferred.wanted.request]
        bins = self._bins()
        for deferred in list(self.waiting.values()):
            self._note(deferred, deferred.epochs + 1, bins)
        return Plan(tuple(starts), given_up)

    def _order(self, deferred: Deferred) -> tuple[int, float]:
        """The eldest of those without patience first, then by urgency; what is equal stays in the order of asking."""
        if deferred.epochs >= self.settings.patience:
            return -deferred.epochs, 0.0
        return 0, deferred.wanted.urgency_s

    def _eldest(self, deferred: Deferred) -> list[Start]:
        """It goes, or the bins that it waits for are kept for it."""
        (candidate,) = self._candidates([deferred])
        (way,) = divide([candidate], self._bins())
        if way is not None:
            return [self._start(deferred, way)]
        self._closed.update((name, deferred.wanted.request) for way in candidate.ways for name in way.bins)
        return []

    # -- the book ----------------------------------------------------------------------------------------------------

    def _turn(self, batches: Mapping[WorkerId, int]) -> None:
        """A new epoch: what is on its way is booked for its share of it."""
        self._batches, self._used, self._closed = batches, {}, {}
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
        """Say why it waits."""
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
        return paths.boundary(name, self.boundaries, self._batches)

    def _candidates(self, group: Sequence[Deferred]) -> list[Candidate]:
        """Moves to one destination, in the order of urgency, with the ways that are worth taking now."""
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
                ways.append(Way(self._bins_of(wanted, via), cost, cost / self.per_epoch(wanted, via)))
        return Candidate(tuple(ways), self.is_pressing(deferred))

    def _bins_of(self, wanted: Wanted, via: Via) -> tuple[Bin, ...]:
        if via is Via.TOKENS:
            return paths.compute(wanted.destination)
        return paths.path(self.boundaries, wanted.source, wanted.destination)


def _via(way: Way) -> Via:
    return Via(way.bins[0][0])
