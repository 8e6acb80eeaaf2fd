"""The control socket as the daemon opens it, in a thread of the test's process, for clients outside its event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop

from melld.control.runtime_directory import open_control_socket
from melld.control.server import Operation, serve_control
from melld.control.status import DaemonStatus
from tests.patience import PATIENCE_S


class Operated:
    """What the control socket serves: a status that the test sets, and the test's operations."""

    def __init__(self, status: DaemonStatus, operations: Mapping[str, Operation] | None = None) -> None:
        self.current = status
        self.operations = dict(operations or {})
        self.asked = 0

    def status(self) -> DaemonStatus:
        self.asked += 1
        return self.current


class ControlDaemon:
    """Answers on the control socket in `directory` within a `with` block, or until `stop`."""

    def __init__(self, directory: Path, context: Operated) -> None:
        self.directory = directory
        self.context = context
        self._loop = uvloop.new_event_loop()
        self._end = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control daemon")

    def _run(self) -> None:
        opened = contextlib.closing(open_control_socket(self.directory))
        with opened as control, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(control))

    async def _serve(self, control) -> None:
        async with serve_control(self.context.operations, self.context.status, control):
            self._listening.set()
            await self._end.wait()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(timeout=PATIENCE_S), "the control socket did not open"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
