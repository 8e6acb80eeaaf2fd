"""This machine as a host: workers are forked from the template process, and speak over socket pairs.

Owns a worker's socket, the pipe that it prints to, and the words for its end.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from melld.engine.host.fate import Fate, end_in_words
from melld.engine.host.lines import OutputLines
from melld.engine.host.local_process import LocalProcess
from melld.engine.host.ports import Ear
from melld.engine.host.standstill import Onlooker, Reach, Standstill
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.frames import READ_BYTES, Buffer
from melld.engine.wire.spec import WorkerSpec

UNREAD_BYTES = 32 << 10
"""What the kernel takes of a worker's wire before it is read: what a worker says waits behind it."""


class LocalHost:
    """This machine.  To be used on the event loop's thread, which must be the main one: see `TemplateProcess`."""

    def __init__(self, template: TemplateProcess) -> None:
        self._template = template

    def spawn(self, spec: WorkerSpec, ear: Ear) -> "LocalChild":
        """See `Host.spawn`."""
        return LocalChild(self._template, with_own_cache(spec, os.environ), ear)


class LocalChild(asyncio.Protocol):
    """A process of this machine, and its wire."""

    def __init__(self, template: TemplateProcess, spec: WorkerSpec, ear: Ear) -> None:
        """Fork it; raise `OSError` as `Host.spawn` does."""
        self._ear = ear
        self._fate = Fate()
        self._lines = OutputLines(ear.printed)
        self._process = LocalProcess(ear.forked, self._exited)
        self._onlooker: Onlooker | None = None
        self._transport: asyncio.Transport | None = None
        lent = spec.arena.files if spec.arena is not None else ()
        self._wire, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        with theirs:
            write_end = self._lines.open()
            try:
                template.spawn(self._process, spec, (theirs.fileno(), write_end, *lent))
            finally:
                os.close(write_end)
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(loop.create_unix_connection(lambda: self, sock=self._wire))

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `Child.write`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(buffers)

    def hold(self, holds: bool) -> None:
        """See `Child.hold`."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if holds else self._transport.resume_reading)()

    def kill(self) -> None:
        """See `Child.kill`."""
        self._fate.about_to_kill(self._process.pid)
        self._process.kill()

    def look(self, reach: Reach) -> Standstill:
        """See `Child.look`."""
        if not self._process.pid:
            return Standstill()
        if self._onlooker is None or self._onlooker.reach != reach:  # what was seen otherwise says nothing
            self._onlooker = Onlooker(self._process.pid, reach)
        return self._onlooker.look()

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._ear.received(data)

    def _exited(self, exit_code: int | None, cause: str) -> None:
        self._connecting.cancel()
        try:
            self._read_rest()
        finally:
            if self._transport is not None:
                self._transport.close()
            self._lines.read_rest()
            self._lines.close()
            reason = cause or end_in_words(exit_code, self._fate.killer, self._lines.last)
            self._ear.exited(reason, self._fate.is_from_outside(exit_code))

    def _read_rest(self) -> None:
        """Read what the process last wrote: why it failed, and the last tokens of its requests."""
        with contextlib.suppress(OSError):  # nothing more is there, or the wire is closed
            while data := self._wire.recv(READ_BYTES, socket.MSG_DONTWAIT):
                self._ear.received(data)


def with_own_cache(spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerSpec:
    """Return the specification with its own directory on this machine for vLLM's GPU compile cache.

    vLLM does not lock these files, and workers start side by side.
    """
    if spec.device_kind != "cuda":
        return spec
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    root = Path(environment.get("VLLM_CACHE_ROOT") or Path(home) / "vllm")
    own = {"VLLM_CACHE_ROOT": str(root / "melld" / spec.worker)}
    return msgspec.structs.replace(spec, environment=spec.environment | own)
