"""One worker process as the daemon sees it: its start, its frames, its end.

Owns one process on its host.  Does not interpret messages, and keeps no lifecycle: `place` does.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from melld.engine.host.intake import Intake
from melld.engine.host.ports import Host
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer, FrameDecoder, encode_frame
from melld.engine.wire.spec import WorkerSpec

log = logging.getLogger("melld.worker")
UNKILLABLE_S = 15.0
"""How long a killed process may take to end: longer, and it waits in its driver, perhaps for ever."""
PROGRESS = re.compile(r"([^|%]{1,60}):\s+(\d{1,3})%")
"""A progress bar as tqdm draws it: vLLM's and Hugging Face's, while they load, download or compile."""


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker process exited.  `reason` is one human-readable line; `expected` if melld asked it to exit.

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
        spec: WorkerSpec,
        host: Host,
        on_message: Callable[[Any, list[bytes]], None],
        on_end: Callable[[WorkerEnded], None],
        intake: Intake,
    ) -> None:
        """Have the process started, and return at once; `WorkerReady` or `WorkerEnded` follows.

        Raises:
            OSError: there are no descriptors or no memory for it now.
        """
        self.spec = spec
        self.asked_to_end = False
        self.why_killed = ""
        """Set when it is killed because it hangs."""
        self.pid = 0
        """0 until it is forked."""
        self._stage = ""
        self._progress = ""
        self.began_s = 0.0
        """When it was forked or last woken, by the loop's clock."""
        self._decoder = FrameDecoder(wire.ToDaemon)
        self._unread: deque[Iterator[tuple[Any, list[bytes]]]] = deque()
        """The frames of each piece that has come."""
        self._intake = intake
        self._on_message = on_message
        self._on_end = on_end
        self._failure: wire.WorkerFailed | None = None
        self._ended = asyncio.Event()
        self._unkillable: asyncio.TimerHandle | None = None
        self._child = host.spawn(spec, self)

    def send(self, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write a frame; drop it if the process is gone (`on_end` tells of that)."""
        self._child.write(encode_frame(message, payload))

    def stop(self, deadline_s: float) -> None:
        """Ask the process to end, and kill it at the deadline; `on_end` follows."""
        if not self._ended.is_set():
            self.asked_to_end = True
            self.send(wire.StopWorker())
            asyncio.get_running_loop().call_later(deadline_s, self.kill)

    def wake(self) -> None:
        """Have the dozing process reload its weights; `WorkerReady` or `WorkerEnded` follows."""
        self.began_s = asyncio.get_running_loop().time()
        self._stage, self._progress = "reloading its weights", ""
        self.send(wire.Wake())

    async def wait_ended(self) -> None:
        """Return once the process has exited and `on_end` has been called."""
        await self._ended.wait()

    def look(self, reach: Reach) -> Standstill:
        """See `Child.look`."""
        return self._child.look(reach)

    def kill(self, why: str = "") -> None:
        """Kill the process, even if it is stopped (SIGSTOP) or stuck in a GPU kernel."""
        self.why_killed = self.why_killed or why
        if self._ended.is_set():
            return
        self._child.kill()
        if self._unkillable is None:
            self._unkillable = asyncio.get_running_loop().call_later(UNKILLABLE_S, self._give_up)

    def _give_up(self) -> None:
        """Count a process that cannot be killed as ended."""
        why = f"it survived SIGKILL for {UNKILLABLE_S:.0f} s: its device or disk hangs"
        self.why_killed = f"{self.why_killed}; {why}" if self.why_killed else why
        self.exited("", from_outside=False)

    @property
    def doing(self) -> str:
        """Return the stage of its start that it last reported, in words."""
        if not self.pid:
            return "importing PyTorch and vLLM (takes a while the first time)"
        return f"{self._stage} ({self._progress})" if self._progress else self._stage

    # -- called by its host: see `Ear` -------------------------------------------------------------------------------

    def forked(self, pid: int) -> None:
        """Note when it was forked."""
        self.pid = pid
        self.began_s = asyncio.get_running_loop().time()

    def received(self, data: bytes) -> None:
        """Queue the next bytes for the intake's turns; pause the wire while earlier ones are unread."""
        if self._unread:
            self._child.hold(True)
        self._unread.append(self._decoder.feed(data))
        self._intake.came(self)

    @property
    def has_more(self) -> bool:
        """See `Wire`."""
        return len(self._unread) > 1 or self._decoder.rest_bytes > 0

    def read_on(self) -> bool:
        """Handle the next frame; return False if none is complete."""
        while self._unread:
            if (frame := next(self._unread[0], None)) is not None:
                self._heard(*frame)
                return True
            self._unread.popleft()
        self._child.hold(False)
        return False

    def printed(self, line: str) -> None:
        """Log the line, and keep the progress that it shows."""
        if (progress := PROGRESS.match(line)) is not None:
            self._progress = f"{progress[1]} {progress[2]} %"
        log.debug("%s: %s", self.spec.worker, line)

    def exited(self, reason: str, from_outside: bool) -> None:
        """Report the end, preferring the worker's own account of its failure."""
        if self._ended.is_set():  # it did end, long after it was killed
            return
        try:
            while self.read_on():
                pass
        finally:
            self._tell_end(reason, from_outside)

    def _tell_end(self, reason: str, from_outside: bool) -> None:
        self._ended.set()
        if self._unkillable is not None:
            self._unkillable.cancel()
        if self.why_killed:
            reason = f"killed by melld: {self.why_killed}"
        elif self._failure is not None:
            reason = self._failure.reason.splitlines()[0]
        self._on_end(WorkerEnded(self.spec.worker, reason, self.asked_to_end, from_outside))

    def _heard(self, message: Any, payload: list[bytes]) -> None:
        if isinstance(message, wire.WorkerLoading):
            self._stage, self._progress = message.stage, ""
            return
        if isinstance(message, wire.WorkerFailed):
            self._failure = message
            for line in message.traceback.splitlines():
                log.debug("%s: %s", self.spec.worker, line)
        if not self._ended.is_set():
            self._on_message(message, payload)
