"""Estimates of how long workers will last: the arithmetic of `mell-plus`.

Owns `life`, the seconds until a worker overflows if no request comes or leaves, from observed growth alone; never
decides.  Lives count moves in flight as done; `takes` counts them as not done.
"""

from collections.abc import Iterator
from itertools import islice

from melld.scheduler.cluster import Cluster
from melld.scheduler.state import Request, Worker

FOREVER_S = 1e9
CAUTION = 1.25
"""Safety factor on the expected time of a move: an overflow costs more than a move that is a little early.  One or two
moves in a hundred take longer still (over 4 GiB/s); `overdue` catches them."""
FORGETTING = 0.98
"""Weight of all earlier moves relative to the next one."""


class MoveTimes:
    """Durations of moves: a line fitted through (bytes, seconds) of those that have ended, newer ones weighted more.

    `expected_s` is 0 until the first move has ended.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._bytes = self._seconds = 0.0  # weighted means
        self._variance = self._covariance = 0.0

    def took(self, kv_bytes: int, seconds: float) -> None:
        """Record a finished move."""
        self._weight = self._weight * FORGETTING + 1.0
        share = 1.0 / self._weight
        bytes_off, seconds_off = kv_bytes - self._bytes, seconds - self._seconds
        self._bytes += share * bytes_off
        self._seconds += share * seconds_off
        self._variance += share * (bytes_off * (kv_bytes - self._bytes) - self._variance)
        self._covariance += share * (bytes_off * (seconds - self._seconds) - self._covariance)

    def expected_s(self, kv_bytes: float) -> float:
        """Return how long a move of that many bytes should take; never decreases with the size."""
        slope = max(self._covariance / self._variance, 0.0) if self._variance > 0.0 else 0.0
        return max(self._seconds + slope * (kv_bytes - self._bytes), 0.0)


class Outlook:
    """Lives of one cluster's workers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.moves = MoveTimes()
        self._unseen_bytes_s = 0.0
        self._wait_s = 0.0  # until the next look, and what a block may take at once
        self._epoch_s: float | None = None

    def next_epoch(self) -> None:
        """Begin an epoch; expect the next after as long as the last one took."""
        now_s, last_s = self.cluster.now_s, self._epoch_s
        self._epoch_s = now_s
        rate = self.cluster.growth.bytes_per_s
        blocks_s = self.cluster.roster.block_bytes / rate if rate else 0.0
        self._wait_s = blocks_s + (now_s - last_s if last_s is not None else 0.0)

    def look_s(self, worker: Worker) -> float:
        """Return how soon relief can take effect: the time until the next epoch plus a mean request's move.

        With instant moves this is the horizon of the settings alone.
        """
        settings = self.cluster.settings
        if settings.instant_moves:
            return settings.horizon_s
        mean_bytes = worker.used_bytes / (worker.count or 1)
        return max(settings.horizon_s, self._wait_s + CAUTION * self.moves.expected_s(mean_bytes))

    def in_time(self, worker: Worker, requests: list[Request]) -> list[Request]:
        """Return the requests that can leave before the worker overflows, judging by past moves; all if none can."""
        left_s, expected_s = self.life_s(worker), self.moves.expected_s
        return [request for request in requests if CAUTION * expected_s(request.kv_bytes) <= left_s] or requests

    def arrives_in_time(self, request: Request, taker: Worker) -> bool:
        """Return True if the request can leave before its worker overflows, even if no other leaves in time.

        Moves already under way to the taker come first, because they share its links and its compute; and first of all
        it must be awake.
        """
        source, wakes_s = request.worker, self.wakes_s(taker)
        if source is None or not (taker.arriving or wakes_s):
            return True
        ahead_s = wakes_s + sum(self.moves.expected_s(one.kv_bytes) for one in taker.arriving.values())
        rate = len(source.requests) * self.growth_bytes_s(source)
        left_s = min(self.life_s(source), max(source.free_bytes, 0) / rate if rate > 0.0 else FOREVER_S)
        return CAUTION * (ahead_s + self.moves.expected_s(request.kv_bytes)) <= left_s

    def growth_bytes_s(self, worker: Worker) -> float:
        """Return the bytes per second that a request on the worker adds: the worker's rate, or the overall one."""
        return worker.growth_bytes_s or self.cluster.growth.bytes_per_s or self._unseen_bytes_s

    def expect_growth(self, bytes_s: float) -> None:
        """Assume this growth per request until some has been observed."""
        self._unseen_bytes_s = bytes_s

    def wakes_s(self, worker: Worker) -> float:
        """Return the remaining wake time of the worker; 0 if it is awake."""
        return max(worker.active_s + worker.wake_s - self.cluster.now_s, 0.0)

    def is_awake_soon(self, taker: Worker, source: Worker) -> bool:
        """Return True if the taker is awake before relief takes effect; a far one, which must recompute, now."""
        is_far = self.cluster.distances.is_far(source, taker)
        return self.wakes_s(taker) <= (0.0 if is_far else self.look_s(source))

    def life_s(self, worker: Worker, more_bytes: int = 0, more: int = 0) -> float:
        """Return the worker's life with `more` requests of `more_bytes` in total added, moves in flight done."""
        free_bytes = worker.capacity_bytes - worker.used_bytes + worker.leaving_bytes - more_bytes
        rate = (worker.count - worker.leaving + more) * self.growth_bytes_s(worker)
        if rate <= 0.0:
            return FOREVER_S if free_bytes >= 0 else -FOREVER_S
        return free_bytes / rate

    def bytes_ahead(self, worker: Worker) -> float:
        """Return the worker's bytes at the next look, moves in flight done, if no request comes or leaves."""
        grown_bytes = (worker.count - worker.leaving) * self.growth_bytes_s(worker) * self.look_s(worker)
        return worker.used_bytes - worker.leaving_bytes + grown_bytes

    def overloaded(self, worker: Worker) -> bool:
        """Return True if the worker overflows before the next look, or runs more requests than its slots."""
        staying = worker.count - worker.leaving
        return staying > worker.slots or (staying > 0 and self.life_s(worker) < self.look_s(worker))

    def overdue(self, worker: Worker) -> bool:
        """Return True if current moves are too late: unless they end, the worker overflows before the next look."""
        grown_bytes = len(worker.requests) * self.growth_bytes_s(worker) * self._wait_s
        return worker.leaving > 0 and worker.free_bytes < grown_bytes

    def takes(self, worker: Worker, kv_bytes: int, more: int = 1) -> bool:
        """Return True if `more` requests of `kv_bytes` in total fit now, with all growth until the next look."""
        cluster = self.cluster
        if not cluster.fits(worker, kv_bytes + (more - 1) * cluster.ahead_bytes) or leaves_wholly(worker):
            return False
        count = worker.count + more
        if count > worker.slots:
            return False
        if count == 1:  # no worker has more room than an empty one
            return True
        grown_bytes = count * self.growth_bytes_s(worker) * self.look_s(worker)
        return worker.used_bytes + kv_bytes + grown_bytes <= worker.capacity_bytes

    def crowds(self, request: Request, worker: Worker) -> bool:
        """Return True if the request is not urgent and would use up the worker's headroom for urgent ones."""
        if request.urgent or not worker.urgent:
            return False
        part = 1.0 - self.cluster.settings.priorities.headroom
        free_bytes = part * worker.capacity_bytes - worker.used_bytes + worker.leaving_bytes
        return request.kv_bytes > free_bytes or worker.count - worker.leaving >= part * worker.slots

    def tightest(self, kv_bytes: int, limit: int, source: Worker) -> list[Worker]:
        """Return up to `limit` workers that take the request from its worker, in the order of `candidates`."""
        found = self.candidates(kv_bytes, 2 * limit, source)
        return [worker for worker in found if self.takes(worker, kv_bytes)][:limit]

    def candidates(self, kv_bytes: int, limit: int, source: Worker) -> Iterator[Worker]:
        """Yield the `limit` tightest other workers with that room, those to which KV can be sent first."""
        neighbours = self.cluster.distances.neighbours(source)
        yield from neighbours
        for worker in islice(self.cluster.room.tightest(kv_bytes), limit):
            if worker is not source and worker not in neighbours:
                yield worker

    def roomiest(self, limit: int) -> list[Worker]:
        """Return up to `limit` workers with the most room."""
        return [worker for worker in islice(self.cluster.room.roomiest(), limit) if not leaves_wholly(worker)]


def leaves_wholly(worker: Worker) -> bool:
    """Return True if all of the worker's requests are leaving: nothing should join it."""
    return 0 < worker.leaving == len(worker.requests) and not worker.arriving
