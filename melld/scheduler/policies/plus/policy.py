"""The policy `mell-plus`: migrates for the near future instead of by size classes.

Owns three decisions, made from present sizes and recent growth (no length is predicted):

    life of a worker = free bytes / bytes per second that its requests add: seconds until it overflows if none leaves

    dispatch   the tightest worker that keeps a sufficient life; else the longest-lived that fits; else one request is
               pushed aside; else a worker is woken; else any worker with room at all: better than queueing
    overload   a worker whose life ends before the next look sends ONE request away, to where both then live longest;
               if nothing fits, a third worker makes room first; else a worker is woken.  If that move comes too late,
               the smallest request leaves as well; if no single departure is enough (the worker has lost capacity),
               the largest requests that others take leave.  A lone request leaves for a larger worker
    drain      when the whole load fits on fewer workers, one with few requests is emptied, all or nothing

A move is made at the last look before an overflow, not earlier, because unforeseen departures make many moves needless.
Candidates are the k tightest workers that fit and the k roomiest: O(k n + log N) per decision, for n requests on a
worker.

Pushing aside, and making room on a third worker, take two moves, the second after the first: they happen only with
instant moves, in the paper's time slots, never in the daemon.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.fit import tightest_fit
from melld.scheduler.policies.plus.outlook import Outlook, leaves_wholly
from melld.scheduler.policies.plus.plans import HolePlan, cheapest_drain, plan_hole
from melld.scheduler.policies.plus.settings import BALANCED, Lifetimes, PlusSettings
from melld.scheduler.policy import Policy
from melld.scheduler.priorities import STAYS_S, class_of
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker

DRAINED = 256  # moves after which an epoch drains no further worker: planning them takes 15 to 26 ms
LEAVERS = 8  # the most requests that leave one worker in an epoch

Move = tuple[Request, Worker]
Chain = tuple[Request, Worker, Request, Worker]
"""The request that makes room and its taker, then the request that follows and its taker."""


class MellPlus(Policy):
    """Policy `mell-plus`; see the module."""

    name: ClassVar[str] = "mell-plus"

    def __init__(self, cluster: Cluster, settings: PlusSettings = BALANCED) -> None:
        super().__init__(cluster)
        self.settings = self._settings = settings
        self.outlook = Outlook(cluster)
        self.lifetimes = Lifetimes()

    # ---- dispatch

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        worker = self._lasting(request) or self._pushed_aside(request)
        worker = worker or self.spare(request.kv_bytes, reason) or tightest_fit(self.cluster, request)
        if worker is not None:
            self.cluster.assign(request, worker, reason)
        return worker is not None

    def _lasting(self, request: Request) -> Worker | None:
        """Return the tightest worker that then lives long enough, else (if urgent, at once) the longest-lived."""
        outlook, size, limit = self.outlook, request.kv_bytes, self.settings.candidates
        enough_s = self.settings.dispatch_life_s
        ample_bytes = size + int(2 * self.cluster.growth.bytes_per_s * enough_s)
        for worker in islice(self.cluster.room.tightest(ample_bytes), 0 if request.urgent else 2 * limit):
            if outlook.crowds(request, worker):
                continue
            lasts = worker is not request.worker and outlook.life_s(worker, size, 1) >= enough_s
            if lasts and worker.count and outlook.takes(worker, size):
                return worker
        best: Worker | None = None
        best_s = False, 0.0
        for worker in outlook.roomiest(limit):
            life_s = outlook.life_s(worker, size, 1)
            found_s = life_s >= 0.0 and not outlook.crowds(request, worker), life_s
            if found_s >= best_s and worker is not request.worker and outlook.takes(worker, size):
                best, best_s = worker, found_s
        return best

    def _pushed_aside(self, request: Request) -> Worker | None:
        """Push a request aside and return the worker with its room; only with instant moves."""
        if not self.cluster.settings.instant_moves:
            return None
        best_s, best = self.settings.push_life_s, None
        for score_s, leaver, taker, source in self._asides(request):
            if score_s > best_s:
                best_s, best = score_s, (leaver, taker, source)
            if score_s >= self.settings.enough_life_s:
                break
        if best is None:
            return None
        leaver, taker, source = best
        self.cluster.assign(leaver, taker, Reason.PUSHED_ASIDE)
        return source

    def _asides(self, request: Request) -> Iterator[tuple[float, Request, Worker, Worker]]:
        """Yield (life afterwards, request that could leave, its taker, worker that then has room for the request)."""
        life_s, size = self.outlook.life_s, request.kv_bytes
        for source in self.outlook.roomiest(self.settings.candidates):
            room_bytes = self.cluster.room_bytes(source)
            for leaver in source.movable if source is not request.worker else ():
                change_bytes = size - leaver.kv_bytes
                source_s = life_s(source, change_bytes)
                if size - source.frees_bytes(leaver.kv_bytes) > room_bytes or source_s <= self.settings.push_life_s:
                    continue
                for taker in self.outlook.tightest(leaver.kv_bytes, self.settings.candidates, source):
                    if taker is not request.worker:
                        yield min(source_s, life_s(taker, leaver.kv_bytes, 1)), leaver, taker, source

    def hole(self, request: Request, most_s: float) -> HolePlan | None:
        """See `Policy.hole`."""
        return plan_hole(request, self.outlook, most_s)

    def suspends(self, request: Request) -> bool:  # noqa: ARG002
        """See `Policy.suspends`."""
        return True

    # ---- overload and drain

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:  # noqa: ARG002
        """See `Policy.departed`."""
        self.lifetimes.ended(self.cluster.now_s - request.placed_s)

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:  # noqa: ARG002
        """See `Policy.moved`."""
        if request.worker is destination and destination.ready_s <= request.moved_s:  # else it waited for a start
            self.outlook.moves.took(request.kv_bytes, self.cluster.now_s - request.moved_s)

    def epoch(self) -> None:
        """Relieve workers that overflow before the next look, then try to use fewer workers."""
        self.relieve()
        self._drain()

    def relieve(self) -> None:
        """Relieve workers that overflow before the next look."""
        self.settings = self._settings.at_pace(self.lifetimes.pace)
        outlook = self.outlook
        outlook.next_epoch()
        for worker in [worker for worker in self.cluster.active.values() if outlook.overdue(worker)]:
            self._hurry(worker)
        overloaded = [worker for worker in self.cluster.active.values() if outlook.overloaded(worker)]
        overloaded.sort(key=lambda worker: (outlook.life_s(worker), worker.order))
        for worker in overloaded:
            self._relieve(worker)

    def _hurry(self, worker: Worker) -> None:
        """Move the smallest request, which leaves soonest, ahead of the current moves.

        No worker is woken for it, nor is one waited for that wakes: both would have to keep its room meanwhile.
        """
        requests = worker.movable
        if requests and worker.count - worker.leaving > 1:
            smallest = min(requests, key=lambda request: (request.kv_bytes, request.sequence))
            move = self._best_move(worker, [smallest])
            if move is not None and self.outlook.is_awake_soon(move[1], worker):
                self.cluster.assign(*move, Reason.OVERLOAD, 0.0)

    def _relieve(self, worker: Worker) -> None:
        for _ in range(LEAVERS):
            requests = self.outlook.in_time(worker, worker.movable)
            if not requests or not self.outlook.overloaded(worker):
                return
            urgency_s = max(self.outlook.life_s(worker), 0.0)
            if worker.count - worker.leaving > 1:
                if not self._let_one_leave(worker, requests, urgency_s):
                    return
            elif (move := self._larger_home(worker, requests[0])) is not None:
                self.cluster.assign(*move, Reason.OVERLOAD, urgency_s)

    def _let_one_leave(self, worker: Worker, requests: list[Request], urgency_s: float) -> bool:
        move = self._best_move(worker, requests)
        if move is None and (chain := self._best_chain(worker, requests)) is not None:
            self.cluster.assign(chain[0], chain[1], Reason.MAKE_ROOM, urgency_s)
            move = chain[2], chain[3]
        if move is None:
            largest_first = sorted(requests, key=lambda request: (-request.kv_bytes, request.sequence))
            move = self._some_relief(worker, largest_first) or self._woken(largest_first)
        if move is None:
            return False
        self.cluster.assign(*move, Reason.OVERLOAD, urgency_s)
        return True

    def _larger_home(self, worker: Worker, request: Request) -> Move | None:
        """Return the request's move to a larger worker, where it lives longer alone."""
        roomiest = self.outlook.roomiest(self.settings.relief_candidates)
        larger = [one for one in self._takers(request, worker, roomiest) if one.capacity_bytes > worker.capacity_bytes]
        taker = max(larger, key=lambda one: self.outlook.life_s(one, request.kv_bytes, 1), default=None)
        if taker is None:
            taker = self.spare(max(request.kv_bytes, worker.capacity_bytes + 1), Reason.OVERLOAD)
        return None if taker is None else (request, taker)

    def _some_relief(self, worker: Worker, largest_first: list[Request]) -> Move | None:
        """Return a move of the largest request that another worker takes, if no single departure is enough."""
        outlook, largest = self.outlook, largest_first[0]
        if outlook.life_s(worker, -largest.kv_bytes, -1) >= outlook.look_s(worker):
            return None
        roomiest = outlook.roomiest(self.settings.relief_candidates)
        for request in largest_first:
            for taker in self._takers(request, worker, roomiest):
                return request, taker
        return None

    def _woken(self, largest_first: list[Request]) -> Move | None:
        """Return a move of the largest request for which a worker can be woken; wake none while another starts."""
        if self._wakes():
            return None
        for request in largest_first:
            if (spare := self.spare(request.kv_bytes, Reason.OVERLOAD)) is not None:
                return request, spare
        return None

    def _wakes(self) -> bool:
        """Return True while some worker starts."""
        return any(worker.wake_s for worker in self.cluster.active.values())

    def _best_move(self, worker: Worker, requests: list[Request]) -> Move | None:
        """Return the move after which source and taker last longest, minus a price for its size and class.

        Life on a far taker counts for nothing, nor does that on one which the request would reach too late; both are
        worse than either.
        """
        outlook, enough_s = self.outlook, self.settings.enough_life_s
        life_s, look_s = outlook.life_s, outlook.look_s(worker)
        roomiest = outlook.roomiest(self.settings.relief_candidates)
        price_s = self.settings.price_s / max(worker.largest_capacity_bytes, 1)
        best_s, best = -float("inf"), None
        for request in requests:
            size = request.kv_bytes
            worker_s = min(life_s(worker, -size, -1), max(enough_s, look_s))
            stays_s = STAYS_S[class_of(request.priority)] * self.lifetimes.pace
            if worker_s < look_s or worker_s - price_s * size - stays_s <= best_s:
                continue
            for taker in self._takers(request, worker, roomiest):
                score_s = min(worker_s, life_s(taker, size, 1)) - price_s * size - stays_s
                is_far, in_time = self.cluster.distances.is_far(worker, taker), outlook.arrives_in_time(request, taker)
                score_s -= enough_s * (is_far + (not in_time))
                if score_s > best_s:
                    best_s, best = score_s, (request, taker)
        return best

    def _best_chain(self, worker: Worker, requests: list[Request]) -> Chain | None:
        """Return two moves: one frees room on a middle worker for a request from here; only with instant moves."""
        if not self.cluster.settings.instant_moves:
            return None
        life_s = self.outlook.life_s
        best_s, best = self.settings.chain_life_s, None
        sources_s = [(request, life_s(worker, -request.kv_bytes, -1)) for request in requests]
        for middle in self.outlook.roomiest(self.settings.relief_candidates):
            room_bytes = self.cluster.room_bytes(middle)
            for first in middle.movable if middle is not worker else ():
                freed_bytes = middle.frees_bytes(first.kv_bytes)
                for last in self.outlook.tightest(first.kv_bytes, self.settings.relief_candidates, middle):
                    last_s = life_s(last, first.kv_bytes, 1) if last is not worker else 0.0
                    for second, source_s in sources_s if last_s > best_s else ():
                        change_bytes = second.kv_bytes - first.kv_bytes
                        score_s = min(last_s, source_s, life_s(middle, change_bytes))
                        if score_s > best_s and second.kv_bytes - freed_bytes <= room_bytes:
                            best_s, best = score_s, (first, last, second, middle)
                if best_s >= self.settings.enough_life_s:
                    return best
        return best

    def _takers(self, request: Request, source: Worker, roomiest: Iterable[Worker]) -> Iterator[Worker]:
        """Yield candidates for the request: the tightest first, then those of `roomiest` that take it."""
        outlook, size = self.outlook, request.kv_bytes
        yield from outlook.tightest(size, self.settings.relief_candidates, source)
        for worker in roomiest:
            if worker is not source and outlook.takes(worker, size):
                yield worker

    def _drain(self) -> None:
        """Empty workers of few requests while the rest stays below `drain_utilisation`.

        Workers that are empty, or about to be, do not count as room.  Growth until the next look counts as used:
        `takes` keeps that room free, so fuller workers would wake another one again.  Growth is unknown until some was
        seen; with instant moves that does no harm.
        """
        settings = self.settings
        if not self.cluster.growth.bytes_per_s and not self.cluster.settings.instant_moves:
            return
        kept = [one for one in self.cluster.active.values() if one.count and not leaves_wholly(one)]
        capacity_bytes = sum(worker.capacity_bytes for worker in kept)
        used_bytes = sum(self.outlook.bytes_ahead(worker) for worker in kept)
        smallest_bytes = min((worker.capacity_bytes for worker in kept), default=0)
        moves = 0
        while moves < DRAINED and used_bytes <= (capacity_bytes - smallest_bytes) * settings.drain_utilisation:
            if (found := cheapest_drain(self.outlook, settings)) is None:
                return
            emptied, plan = found
            for request, taker in plan:
                self.cluster.assign(request, taker, Reason.DRAIN)
            capacity_bytes -= emptied.capacity_bytes
            moves += len(plan)
