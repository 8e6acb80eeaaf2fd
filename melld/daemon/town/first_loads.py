"""The first loads of several models: at the start, and of each model, which then gets its front end.

Owns when the start is over, and which front ends are being made.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from melld.daemon.model import ServedModel
from melld.engine.fleet.first_start import WorkerStartFailed
from melld.engine.fleet.place import Place
from melld.errors import MelldError
from melld.ids import WorkerId


class NothingFits(MelldError):
    """No model fits on any device."""

    def __init__(self) -> None:
        super().__init__(
            "no model fits on any device with the least KV memory: allow more in [devices], or serve smaller models"
        )


class FirstLoads:
    """The workers that are loaded at the start, each with its failure, if it has failed.

    `on_ready` is called for each that serves.
    """

    def __init__(self, on_ready: Callable[[Place], None]) -> None:
        self._failures: dict[WorkerId, WorkerStartFailed | None] = {}
        self._loading: set[WorkerId] = set()
        self._over = asyncio.Event()
        self._on_ready = on_ready

    def begun(self, worker: WorkerId) -> None:
        """Note that the worker is loaded; later loads are not first ones."""
        if not self._over.is_set():
            self._failures[worker] = None
            self._loading.add(worker)

    def ready(self, place: Place) -> None:
        """Report a worker that serves, while the start lasts."""
        if not self._over.is_set():
            self._on_ready(place)

    def ended(self, worker: WorkerId, failure: WorkerStartFailed | None = None) -> None:
        """Note that the worker is ready, or has failed or left."""
        if worker in self._loading:
            self._loading.discard(worker)
            self._failures[worker] = failure
            if not self._loading:
                self._over.set()

    async def wait(self) -> None:
        """Return when no load is left and at least one worker is ready.

        Raises:
            WorkerStartFailed: none is; this is the first failure.
            NothingFits: none was to be loaded.
        """
        if not self._failures:
            raise NothingFits
        await self._over.wait()
        if None not in self._failures.values():
            raise next(failure for failure in self._failures.values() if failure is not None)


class FrontEnds:
    """Makes the front end of each model that has been loaded, once.  `do` runs a task, and tells why it has failed.

    `open_model` does it; None until calls can be served.
    """

    def __init__(self, do: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self.open_model: Callable[[ServedModel], Coroutine[Any, Any, None]] | None = None
        self._do = do
        self._opening: set[ServedModel] = set()

    def open(self, model: ServedModel) -> None:
        """Wake the calls that wait for a model that is loaded, or have its front end made."""
        if model.is_warm and model.serving is not None:
            model.loaded()
        elif model.is_warm and self.open_model is not None and model not in self._opening:
            self._opening.add(model)
            self._do(self.open_model(model)).add_done_callback(partial(self._opened, model))

    def _opened(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        self._opening.discard(model)
        if not task.cancelled() and (error := task.exception()) is not None:
            model.failed(f"its front end could not be created: {error}", 0.0)
