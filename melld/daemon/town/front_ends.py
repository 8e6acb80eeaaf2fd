"""Makes each model's front end after its first load.

Owns which front ends are being made.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from melld.daemon.model import ServedModel


class FrontEnds:
    """Creates each loaded model's front end once.  `do` runs a task and logs its failure.

    `open_model` does it; None until calls can be served.
    """

    def __init__(self, do: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self.open_model: Callable[[ServedModel], Coroutine[Any, Any, None]] | None = None
        self._do = do
        self._opening: set[ServedModel] = set()

    def open(self, model: ServedModel) -> None:
        """Wake the calls that wait for a loaded model, or have its front end made."""
        if model.is_warm and model.serving is not None:
            model.loaded()
        elif model.is_warm and self.open_model is not None and model not in self._opening:
            self._opening.add(model)
            self._do(self.open_model(model)).add_done_callback(partial(self._opened, model))

    def _opened(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        self._opening.discard(model)
        if not task.cancelled() and (error := task.exception()) is not None:
            model.failed(f"its front end could not be created: {error}", 0.0)
