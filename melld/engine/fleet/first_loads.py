"""The workers' first loads: over once each is ready, failed or kept out, and one is ready.

Owns when they are over, and the first failure.  Starts nothing.
"""

import asyncio
from collections.abc import Callable

from melld.engine.fleet.place import Place
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


class FirstLoads:
    """The first loads of some workers, with a report as each starts and ends."""

    def __init__(self) -> None:
        self.begun: set[WorkerId] = set()
        self.anyone_was_ready = False
        """The model is known to be servable."""
        self._loading: set[WorkerId] = set()
        self._ready: set[WorkerId] = set()
        self._failure: WorkerStartFailed | None = None
        self._over: asyncio.Future[None] | None = None
        self._on_ready: Callable[[Place], None] = lambda _: None

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
