"""One worker process as the daemon sees it: its fork, its wire, what it prints, its end.

Owns one process, one socket and one pipe.  Does not interpret messages, and keeps no lifecycle: `place` does.
"""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from melld.engine.fleet.fate import Fate, end_in_words
from melld.engine.fleet.template import OutputLines, TemplateProcess
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer, FrameDecoder, encode_frame

log = logging.getLogger("melld.worker")
PROGRESS = re.compile(r"([^|%]{1,60}):\s+(\d{1,3})%")
"""A progress bar as tqdm draws it: vLLM's and Hugging Face's, while they load, download or compile."""


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker process is gone.  `reason` is one line for people; `expected` if melld asked it to end.

    `from_outside`: no request of it is to blame (`fate`).
    """

    worker: str
    reason: str
    expected: bool
    from_outside: bool = False


class WorkerProcess:
    """A worker and its wire.  Calls `on_message(message, payload)` and `on_end(ended)` on the event loop."""

    def __init__(
        self,
        spec: wire.WorkerSpec,
        template: TemplateProcess,
        on_message: Callable[[Any, list[bytes]], None],
        on_end: Callable[[WorkerEnded], None],
    ) -> None:
        self.spec = spec
        self.asked_to_end = False
        self.pid = 0
        """0 until the template has forked it."""
        self._stage = ""
        self._progress = ""
        self.forked_s = 0.0
        """When it was forked, by the loop's clock."""
        self._template = template
        self._on_message = on_message
        self._on_end = on_end
        self._failure: wire.WorkerFailed | None = None
        self._lines = OutputLines(self._printed)
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()
        self._fate = Fate()

    async def start(self) -> None:
        """Have the process forked.  Returns at once; `WorkerReady` or `WorkerEnded` follows.

        Must run on the daemon's main thread: the kernel ties the template's life to the thread that started it.
        """
        ours, theirs = socket.socketpair()
        write_end = self._lines.open()
        try:
            self._birth = self._template.spawn(self.spec, (theirs.fileno(), write_end), self._forked, self._exited)
        finally:
            theirs.close()
            os.close(write_end)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Wire(self._received), sock=ours)

    def send(self, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write a frame; drop it if the process is gone (`on_end` tells of that)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode_frame(message, payload))

    def stop(self, deadline_s: float) -> Coroutine[Any, Any, None]:
        """Ask the process to end, at once.  The returned coroutine waits for its end and kills it at the deadline."""
        if not self._ended.is_set():
            self.asked_to_end = True
            self.send(wire.StopWorker())
        return self._wait_or_kill(deadline_s)

    async def _wait_or_kill(self, deadline_s: float) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), deadline_s)
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    async def wait_ended(self) -> None:
        """Return when the process is gone and `on_end` has been called."""
        await self._ended.wait()

    def kill(self) -> None:
        """Kill the process, even if it is stopped (SIGSTOP) or stuck in a GPU kernel."""
        if not self._ended.is_set():
            self._fate.about_to_kill(self.pid)
            self._template.kill(self._birth)

    @property
    def doing(self) -> str:
        """Return the stage of its start that it last reported, in words."""
        if not self.pid:
            return "importing PyTorch and vLLM (takes a while the first time)"
        return f"{self._stage} ({self._progress})" if self._progress else self._stage

    def _received(self, message: Any, payload: list[bytes]) -> None:
        if isinstance(message, wire.WorkerLoading):
            self._stage, self._progress = message.stage, ""
            return
        if isinstance(message, wire.WorkerFailed):
            self._failure = message
            for line in message.traceback.splitlines():
                log.debug("%s: %s", self.spec.worker, line)
        if not self._ended.is_set():
            self._on_message(message, payload)

    def _printed(self, line: str) -> None:
        if (progress := PROGRESS.match(line)) is not None:
            self._progress = f"{progress[1]} {progress[2]} %"
        log.debug("%s: %s", self.spec.worker, line)

    def _forked(self, pid: int) -> None:
        self.pid = pid
        self.forked_s = asyncio.get_running_loop().time()

    def _exited(self, exit_code: int | None, cause: str) -> None:
        if self._transport is not None:
            self._transport.close()
        self._lines.read_rest()
        self._ended.set()
        from_outside = self._fate.is_from_outside(exit_code)
        reason = cause or self._reason(exit_code)
        self._on_end(WorkerEnded(self.spec.worker, reason, self.asked_to_end, from_outside))

    def _reason(self, exit_code: int | None) -> str:
        if self._failure is not None:
            return self._failure.reason.splitlines()[0]
        return end_in_words(exit_code, self._fate.killer, self._lines.last)


class _Wire(asyncio.Protocol):
    def __init__(self, received: Callable[[Any, list[bytes]], None]) -> None:
        self._decoder = FrameDecoder(wire.ToDaemon)
        self._received = received

    def data_received(self, data: bytes) -> None:
        for message, payload in self._decoder.feed(data):
            self._received(message, payload)
