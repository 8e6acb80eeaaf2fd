"""The start of all workers with the daemon: over once each is ready, has failed or is kept out, and one is ready.

Owns when it is over, and its first failure.  Starts nothing: the supervisor does.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator

from melld.engine.fleet.place import Place
from melld.errors import MelldError


class WorkerStartFailed(MelldError):
    """No worker could be started with the daemon; this is the first failure."""

    def __init__(self, worker: str, device: str, reason: str) -> None:
        super().__init__(f"worker {worker} on {device} could not start: {reason}")
        self.worker = worker
        self.device = device
        self.reason = reason

    def because_of(self, option: str | None) -> "WorkerStartFailed":
        """Return the same error with the key of the configuration to look at."""
        hint = f" (see [model.vllm] {option})" if option else ""
        return WorkerStartFailed(self.worker, self.device, self.reason + hint)


class FirstStart:
    """The first start of the workers in these places."""

    def __init__(self, places: Collection[Place]) -> None:
        self._places = places
        self._over: asyncio.Future[None] | None = None
        self._failure: WorkerStartFailed | None = None
        self._on_ready: Callable[[Place], None] | None = None

    @property
    def anybody_was_ready(self) -> bool:
        """Return True once the model is known to be servable."""
        return any(place.has_been_ready for place in self._places)

    @contextlib.contextmanager
    def told(self, on_ready: Callable[[Place], None]) -> Iterator[asyncio.Future[None]]:
        """Yield a future of its end, or first failure; within the block, call `on_ready` for each ready worker."""
        self._over, self._on_ready = asyncio.get_running_loop().create_future(), on_ready
        try:
            yield self._over
        finally:
            self._over = self._on_ready = None

    def became_ready(self, place: Place) -> None:
        """Tell of a ready worker."""
        if self._on_ready is not None:
            self._on_ready(place)
        self.check()

    def failed(self, failure: WorkerStartFailed) -> None:
        """Note that a worker has died."""
        self._failure = self._failure or failure

    def check(self) -> None:
        """End the start if no worker is still loading for the first time; nobody waits for one that is kept out."""
        is_over = bool(self._places) and all(
            place.has_been_ready or place.setbacks or place.stays_out for place in self._places
        )
        if self._over is None or self._over.done() or not is_over:
            return
        if any(place.is_ready for place in self._places):
            self._over.set_result(None)
        elif not self.anybody_was_ready and self._failure is not None:  # else all are kept out: one comes back
            self._over.set_exception(self._failure)
