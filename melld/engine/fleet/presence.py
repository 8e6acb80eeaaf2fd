"""What the scheduler believes of each worker, and the requests that wait for one to wake.

Owns both.  A worker whose process has been ended on purpose stays known: the scheduler may place requests on it, and
they are held here until it is ready.  Only one that dies, or does not wake, is taken from the scheduler.
"""

from collections.abc import Iterator

import msgspec

from melld.ids import RequestId, WorkerId
from melld.scheduler import events


class Offer(msgspec.Struct, frozen=True):
    """What a worker has."""

    capacity_bytes: int
    slots: int
    block_bytes: int
    steady: bool = True


class Presence:
    """All workers of a fleet."""

    def __init__(self) -> None:
        self._offers: dict[WorkerId, Offer] = {}
        self._held: dict[WorkerId, list[RequestId]] = {}
        self._cold: set[WorkerId] = set()

    def ready(self, worker: WorkerId, offer: Offer, now_s: float) -> Iterator[events.AnyEvent]:
        """Its process has produced a token.  Yields what the scheduler does not know yet."""
        known = self._offers.get(worker)
        self._offers[worker] = offer
        if known is None:
            offered = offer.capacity_bytes, offer.slots
            yield events.WorkerUp(now_s, worker, *offered, block_bytes=offer.block_bytes, steady=offer.steady)
            return
        if known.capacity_bytes != offer.capacity_bytes:
            yield events.WorkerCapacityChanged(now_s, worker=worker, capacity_bytes=offer.capacity_bytes)
        if known.slots != offer.slots:
            yield events.WorkerSlotsChanged(now_s, worker=worker, slots=offer.slots)
        if worker in self._cold:
            self._cold.discard(worker)
            yield events.WorkerWakeTimeChanged(now_s, worker=worker, wake_s=0.0)

    def limit(self, worker: WorkerId, slots: int, now_s: float) -> Iterator[events.AnyEvent]:
        """It shall run at most so many requests at once."""
        known = self._offers.get(worker)
        if known is not None and known.slots != slots:
            self._offers[worker] = msgspec.structs.replace(known, slots=slots)
            yield events.WorkerSlotsChanged(now_s, worker=worker, slots=slots)

    def resize(self, worker: WorkerId, capacity_bytes: int, now_s: float) -> Iterator[events.AnyEvent]:
        """Others have taken from its device, or given back: it holds so much."""
        known = self._offers.get(worker)
        if known is not None and known.capacity_bytes != capacity_bytes:
            self._offers[worker] = msgspec.structs.replace(known, capacity_bytes=capacity_bytes)
            yield events.WorkerCapacityChanged(now_s, worker=worker, capacity_bytes=capacity_bytes)

    def stopped(self, worker: WorkerId, wake_s: float, now_s: float) -> Iterator[events.AnyEvent]:
        """Its process ends on purpose.  What is held for it stays held."""
        if worker in self._offers and worker not in self._cold:
            self._cold.add(worker)
            yield events.WorkerWakeTimeChanged(now_s, worker=worker, wake_s=wake_s)

    def lost(self, worker: WorkerId, now_s: float) -> Iterator[events.AnyEvent]:
        """It has died, or did not wake: its requests, the held ones too, are placed anew."""
        self._held.pop(worker, None)
        self._cold.discard(worker)
        if self._offers.pop(worker, None) is not None:
            yield events.WorkerDown(now_s, worker=worker)

    def hold(self, request: RequestId, worker: WorkerId) -> None:
        """The request is that worker's once it is ready."""
        self._held.setdefault(worker, []).append(request)

    def release(self, worker: WorkerId) -> list[RequestId]:
        """Those that were held for it, in the order in which they came; some may have ended meanwhile."""
        return self._held.pop(worker, [])

    def holds(self, request: RequestId, worker: WorkerId) -> bool:
        """Whether it waits for that worker."""
        return request in self._held.get(worker, ())
