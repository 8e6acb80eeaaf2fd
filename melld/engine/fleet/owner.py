"""Who decides which workers have a process: the rule of a lone model, or the Landlord of several.

Owns when the workers' first loads are over: once each is ready, failed or kept out, and one is ready.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from melld.engine.fleet.execution import Execution
from melld.engine.fleet.life import Event, State
from melld.engine.fleet.place import Offer, Place
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.errors import MelldError
from melld.ids import WorkerId


class WorkerStartFailed(MelldError):
    """No worker could be started with the daemon; this is the first failure."""

    def __init__(self, worker: str, device: str, reason: str) -> None:
        super().__init__(f"worker {worker} on {device} failed to start: {reason}")
        self.worker = worker
        self.device = device
        self.reason = reason

    def because_of(self, option: str | None) -> "WorkerStartFailed":
        """Return the error with the configuration key to look at."""
        hint = f" (see [model.vllm] {option})" if option else ""
        return WorkerStartFailed(self.worker, self.device, self.reason + hint)


class NothingFits(MelldError):
    """No model fits on any device."""

    def __init__(self) -> None:
        super().__init__(
            "no model fits on any device, even with minimal KV memory: allow more in [devices], or serve smaller models"
        )


class Offers(Protocol):
    """A fleet as it tells its scheduler of its workers."""

    def announce(self, worker: WorkerId, offer: Offer) -> None:
        """Tell it what a ready worker offers."""

    def change(self, worker: WorkerId, **changes: Any) -> None:
        """Tell it what changes of that."""


class Owner:
    """Decides which workers have a process.  Called on the event loop."""

    wants_all = False
    """Every worker runs that may, and is given up if it cannot."""

    def __init__(self) -> None:
        self.begun: set[WorkerId] = set()
        self.anyone_was_ready = False
        """The model is known to be servable."""
        self._loading: set[WorkerId] = set()
        self._ready: set[WorkerId] = set()
        self._failure: WorkerStartFailed | None = None
        self._over: asyncio.Future[None] | None = None
        self._on_ready: Callable[[Place], None] = lambda _: None

    # -- its decisions -----------------------------------------------------------------------------------------------

    def wanted(self, worker: WorkerId) -> None:
        """Note that a worker without a process has requests, or will have."""

    def can_serve(self) -> None:
        """Note that a worker has loaded the model."""
        self.anyone_was_ready = True

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady, offers: Offers) -> None:
        """Note that the worker serves; let its scheduler hear of that."""

    def worker_rests(self, worker: WorkerId, offers: Offers) -> None:
        """Note that the worker's process ends on purpose; likewise."""

    def worker_ended(self, worker: WorkerId, ended: WorkerEnded) -> None:
        """Handle the exit of the process, after its requests have left it."""

    def worker_gone(self, worker: WorkerId) -> None:
        """Note that the worker has ended or dozes, and that no other worker still copies from its memory."""

    def worker_freed(self, place: Place) -> None:
        """Note that nothing is in a worker's way any longer."""

    def returned(self, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        """Note granules that a worker gave back, in time or late."""

    # -- first loads, with a report as each starts and ends ----------------------------------------------------------

    async def wait(self, on_ready: Callable[[Place], None]) -> None:
        """Return when they are over; until then, call `on_ready` for each worker that becomes ready.

        Raises:
            WorkerStartFailed: none became ready.
        """
        self._over, self._on_ready = asyncio.get_running_loop().create_future(), on_ready
        self._check()
        await self._over

    def begins(self, worker: WorkerId) -> None:
        """Note that the worker loads; later loads are not first ones."""
        if worker not in self.begun and not self._is_over:
            self.begun.add(worker)
            self._loading.add(worker)

    def is_ready(self, place: Place) -> None:
        """Note that the worker is ready."""
        self.anyone_was_ready = True
        self._ready.add(place.slot.worker)
        self._loading.discard(place.slot.worker)
        if not self._is_over:
            self._on_ready(place)
        self._check()

    def ended(self, worker: WorkerId, failure: WorkerStartFailed | None = None) -> None:
        """Note that the worker has failed or is kept out."""
        self._failure = self._failure or failure
        self._ready.discard(worker)
        self._loading.discard(worker)
        self._check()

    @property
    def _is_over(self) -> bool:
        return self._over is not None and self._over.done()

    def _check(self) -> None:
        if self._over is None or self._over.done() or not self.begun or self._loading:
            return
        if self._ready:
            self._over.set_result(None)
        elif not self.anyone_was_ready and self._failure is not None:  # else all are kept out: one comes back
            self._over.set_exception(self._failure)


class Alone(Owner):
    """The rule of a lone model: every worker runs that nobody has leave, and a dead one is restarted."""

    wants_all = True

    def __init__(self, places: Mapping[WorkerId, Place], run: Execution) -> None:
        super().__init__()
        self._places = places
        self._run = run

    def wanted(self, worker: WorkerId) -> None:
        """See `Owner`."""
        self._run.take(self._places[worker], Event.WAKE)

    def can_serve(self) -> None:
        """See `Owner`: now it is known that those which have failed can be restarted."""
        was_known = self.anyone_was_ready
        super().can_serve()
        for failed in self._places.values() if not was_known else ():
            if failed.life.state is State.FAILED:
                self._run.restart(failed)

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady, offers: Offers) -> None:
        """See `Owner`."""
        capacity_bytes = ready.geometry.bytes_for_blocks(ready.total_blocks)
        steady = not self._places[worker].life.setbacks
        offers.announce(worker, Offer(capacity_bytes, ready.max_requests, ready.geometry.block_bytes, steady))

    def worker_rests(self, worker: WorkerId, offers: Offers) -> None:
        """See `Owner`: it can be woken."""
        offers.change(worker, wake_s=self._places[worker].wake_s)

    def worker_ended(self, worker: WorkerId, ended: WorkerEnded) -> None:
        """See `Owner`."""
        place = self._places[worker]
        if ended.expected and place.offer is None:  # its scheduler knows it no more, and cannot have it woken
            self._run.take(place, Event.WAKE)
        elif place.life.state is State.FAILED and self.anyone_was_ready:
            self._run.restart(place)

    def worker_freed(self, place: Place) -> None:
        """See `Owner`."""
        if place.life.state is State.FAILED:
            self._run.restart(place)
        elif not place.is_ready:
            self._run.take(place, Event.WAKE)
