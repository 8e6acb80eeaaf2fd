"""The daemon's side of one judge: its start from the template, its wire, its end.

Owns one process and one socket.  The process runs `melld.engine.worker.judge`.  Its output is discarded, as it may
contain a client's text.
"""

import asyncio
import os
import socket
from collections.abc import Callable

from melld.engine.host.local_process import LocalProcess
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.frames import FrameDecoder, encode_frame
from melld.engine.wire.judge import FromJudge, JudgeConstraint, JudgeReady, Verdict
from melld.engine.wire.spec import WorkerSpec


class JudgeProcess(asyncio.Protocol):
    """A judge.  Calls `on_ready`, `on_verdict` and, last, `on_end(exit_code)` on the event loop."""

    def __init__(
        self,
        on_ready: Callable[["JudgeProcess"], None],
        on_verdict: Callable[["JudgeProcess", Verdict, list[bytes]], None],
        on_end: Callable[["JudgeProcess", int | None], None],
    ) -> None:
        self._on_ready = on_ready
        self._on_verdict = on_verdict
        self._on_end = on_end
        self._decoder = FrameDecoder(FromJudge)
        self._transport: asyncio.Transport | None = None
        self._process = LocalProcess(lambda _: None, self._exited)

    async def start(self, template: TemplateProcess, spec: WorkerSpec) -> None:
        """Start the process and return at once; `on_ready` or `on_end` follows."""
        ours, theirs = socket.socketpair()
        silence = os.open(os.devnull, os.O_WRONLY)
        try:
            template.spawn(self._process, spec, (theirs.fileno(), silence), "judge")
        finally:
            theirs.close()
            os.close(silence)
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    def ask(self, constraint: bytes, cpu_s: float) -> None:
        """Send a constraint; `on_verdict` or `on_end` follows."""
        assert self._transport is not None
        if not self._transport.is_closing():  # else it has ended, of which the template has still to tell
            self._transport.writelines(encode_frame(JudgeConstraint(cpu_s=cpu_s), [constraint]))

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for message, payload in self._decoder.feed(data):
            if isinstance(message, JudgeReady):
                self._on_ready(self)
            else:
                self._on_verdict(self, message, payload)

    def _exited(self, exit_code: int | None, _cause: str) -> None:
        if self._transport is not None:
            self._transport.close()
        self._on_end(self, exit_code)
