"""The daemon's side of one judge: its start from the template, its wire, and its end.

Owns one process, which runs `melld.engine.worker.judge`, and one socket.  The process's output is discarded, as it may
contain clients' texts.
"""

import asyncio
import contextlib
import os
import signal
import socket

import psutil

from melld.engine.host.local_process import LocalProcess
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.frames import FrameDecoder, encode_frame
from melld.engine.wire.judge import FromJudge, JudgeConstraint, Verdict
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.process_meter import UNREADABLE


class JudgeEnded(Exception):
    """The judge ended before it answered."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"a judge for output constraints exited with code {exit_code}")
        self.was_killed = exit_code in (None, -signal.SIGKILL)
        """Whether something other than its limits killed it; None: unknown."""


class JudgeProcess(asyncio.Protocol):
    """A judge, which answers one question at a time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        """Its exit code once it has ended; None if that is unknown."""
        self._answer: asyncio.Future[tuple[FromJudge, list[bytes]]] = loop.create_future()
        self._decoder = FrameDecoder(FromJudge)
        self._transport: asyncio.Transport | None = None
        self._process = LocalProcess(lambda _: None, self._exited)

    async def start(self, template: TemplateProcess, spec: WorkerSpec) -> None:
        """Start the process, and return once it accepts constraints.

        Raises:
            OSError: it cannot be started.
            JudgeEnded: it has already ended.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            ours, theirs = socket.socketpair()
            silence = os.open(os.devnull, os.O_WRONLY)
            try:
                template.spawn(self._process, spec, (theirs.fileno(), silence), "judge")
            finally:
                theirs.close()
                os.close(silence)
            self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            await self._answered()
            undo.pop_all()

    async def compile(self, constraint: bytes, cpu_s: float, stopped_s: float) -> tuple[Verdict, list[bytes]]:
        """Return the judge's verdict, and the constraint as a worker must compile it.

        Raises:
            JudgeEnded: it has ended without an answer.
            TimeoutError: it has not run for `stopped_s`.
        """
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if not self._transport.is_closing():  # otherwise it has ended, and the template will report that
            self._transport.writelines(encode_frame(JudgeConstraint(cpu_s=cpu_s), [constraint]))
        verdict, payload = await self._answered(stopped_s)
        assert isinstance(verdict, Verdict)
        return verdict, payload

    def kill(self) -> None:
        """Kill the process; one that could not be requested counts as ended."""
        self._process.kill()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for message, payload in self._decoder.feed(data):
            self._answer.set_result((message, payload))

    async def _answered(self, stopped_s: float | None = None) -> tuple[FromJudge, list[bytes]]:
        either, before = (self._answer, self.ended), object()
        while not (await asyncio.wait(either, timeout=stopped_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            used = None
            with contextlib.suppress(*UNREADABLE, OSError):  # it has ended, or no descriptor is left
                used = psutil.Process(self._process.pid).cpu_times()
            if used == before:
                raise TimeoutError
            before = used
        if self._answer.done():
            return self._answer.result()
        raise JudgeEnded(self.ended.result())

    def _exited(self, exit_code: int | None, _cause: str) -> None:
        if self._transport is not None:
            self._transport.close()
        self.ended.set_result(exit_code)
