"""How long workers will last: the arithmetic of `mell-plus`.

Owns `life`, the seconds until a worker overflows if nobody comes or leaves, from observed growth alone; never decides.
Moves in flight count as done where lives are judged, and as not done where room is taken (`takes`).
"""

from itertools import islice

from melld.scheduler.cluster import Cluster
from melld.scheduler.state import Request, RequestState, Worker

FOREVER_S = 1e9
FORGETTING = 0.995  # of the slowest move, with each faster one


class Outlook:
    """Lives of one cluster's workers.  `look_s`: until when nothing can be mended, one epoch or a move's time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.look_s = cluster.settings.horizon_s
        self._epoch_s: float | None = None
        self._slowest_s = 0.0
        self._slowest_bytes = 0

    def next_epoch(self) -> None:
        """An epoch begins: until the next, and until a move decided then could be over, nothing can be mended."""
        now_s, last_s = self.cluster.now_s, self._epoch_s
        self._epoch_s = now_s
        if last_s is not None:
            self.look_s = max(self.cluster.settings.horizon_s, now_s - last_s + self._slowest_s)

    def move_took(self, kv_bytes: int, seconds: float) -> None:
        """A move has ended; the slowest of late is reckoned with."""
        self._slowest_s *= FORGETTING
        if seconds > self._slowest_s:
            self._slowest_s, self._slowest_bytes = seconds, kv_bytes

    def in_time(self, worker: Worker, requests: list[Request]) -> list[Request]:
        """Those that would be gone before the worker overflows, as far as past moves tell; all if none would."""
        if not self._slowest_bytes:
            return requests
        left_s = self.life_s(worker)
        per_byte_s = self._slowest_s / self._slowest_bytes
        return [r for r in requests if max(self._slowest_s, r.kv_bytes * per_byte_s) <= left_s] or requests

    def growth_bytes_s(self, worker: Worker) -> float:
        """What one request on the worker adds per second: its own rate, or everybody's while it has none."""
        return worker.growth_bytes_s or self.cluster.growth.bytes_per_s

    def life_s(self, worker: Worker, more_bytes: int = 0, more: int = 0) -> float:
        """Life with `more` requests of `more_bytes` in all than it will have once moves in flight are done."""
        free_bytes = worker.capacity_bytes - worker.used_bytes + worker.leaving_bytes - more_bytes
        rate = (len(worker.requests) + len(worker.arriving) - worker.leaving + more) * self.growth_bytes_s(worker)
        if rate <= 0.0:
            return FOREVER_S if free_bytes >= 0 else -FOREVER_S
        return free_bytes / rate

    def overloaded(self, worker: Worker) -> bool:
        """Whether the worker overflows before the next look, or runs more requests than it should."""
        staying = len(worker.requests) + len(worker.arriving) - worker.leaving
        return staying > worker.slots or (staying > 0 and self.life_s(worker) < self.look_s)

    def takes(self, worker: Worker, kv_bytes: int, more: int = 1) -> bool:
        """Whether `more` requests of `kv_bytes` in all fit now, everybody's growth until the next look included."""
        cluster = self.cluster
        if not cluster.fits(worker, kv_bytes + (more - 1) * cluster.ahead_bytes) or leaves_wholly(worker):
            return False
        count = len(worker.requests) + len(worker.arriving) + more
        if count > worker.slots:
            return False
        return worker.used_bytes + kv_bytes + count * self.growth_bytes_s(worker) * self.look_s <= worker.capacity_bytes

    def tightest(self, kv_bytes: int, limit: int, but: Worker | None) -> list[Worker]:
        """Up to `limit` workers that take the request, the tightest first."""
        found = islice(self.cluster.room.tightest(kv_bytes), 2 * limit)
        return [worker for worker in found if worker is not but and self.takes(worker, kv_bytes)][:limit]

    def roomiest(self, limit: int) -> list[Worker]:
        """Up to `limit` workers with the most room."""
        return [worker for worker in islice(self.cluster.room.roomiest(), limit) if not leaves_wholly(worker)]


def leaves_wholly(worker: Worker) -> bool:
    """Whether all that the worker has is on its way out: nothing should join it."""
    return 0 < worker.leaving == len(worker.requests) and not worker.arriving


def movable(worker: Worker) -> list[Request]:
    """Requests that are not on a move already."""
    if not worker.leaving:
        return list(worker.requests.values())
    return [request for request in worker.requests.values() if request.state is RequestState.RUNNING]
