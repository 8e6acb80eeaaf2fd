"""One run of the template process as the daemon sees it, and the processes that it has forked.

Owns that process, its wire, and the ends of its children.  Never reads what a worker sends.

A template that stands still hides how its children end, and forks none.  It is given up then: its children live on
and their ends are read from /proc, but no more are asked of it.
"""

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from melld.engine.host.fate import Fate, end_in_words
from melld.engine.host.lines import OutputLines
from melld.engine.host.standstill import Onlooker
from melld.engine.wire.spec import (
    MAX_MESSAGE_BYTES,
    FromTemplate,
    Program,
    SpawnWorker,
    TemplateImporting,
    WorkerExited,
    WorkerForked,
    WorkerSpec,
)

log = logging.getLogger("melld.template")
ENDING_S = 0.2
"""How long a process may take from closing its wire to its end."""
LOOK_S = 1.0
STOPPED_LOOKS = 5
IDLE_LOOKS = 60
"""Looks that must find it stopped, or idle, while an answer is due; it may be importing from a slow disk."""


class Birth:
    """A process to ask for.

    Calls `on_forked(pid)`, then `on_exited(exit_code, cause)`; `cause` is "" if only the exit code is known.
    """

    def __init__(self, on_forked: Callable[[int], None], on_exited: Callable[[int | None, str], None]) -> None:
        self.forks: Forks | None = None
        self.number = 0
        self.pid = 0
        """0 until it is forked."""
        self.on_forked = on_forked
        self.on_exited = on_exited
        self.end: int | None = None
        """A descriptor that becomes readable when the process ends."""
        self.has_ended = False

    def kill(self) -> None:
        """Kill the process; one that is not forked yet counts as ended now and is killed when it appears."""
        if self.forks is not None:
            self.forks.kill(self)


class Forks:
    """One run of the template.  Calls `on_done(forks)` once it no longer forks: exited or given up."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        lines: OutputLines,
        on_done: Callable[["Forks"], None],
    ) -> None:
        self._process = process
        self._control = control
        self._lines = lines
        self._on_done = on_done
        self._unsent: collections.deque[tuple[bytes, list[int], contextlib.ExitStack]] = collections.deque()
        """What the template's socket had no room for, its descriptors, and what closes them."""
        self._births: dict[int, Birth] = {}
        self._unwanted: set[int] = set()
        self.imported: TemplateImporting | None = None
        """What it last said of its imports, until it forks."""
        self._numbers = 0
        self._fate = Fate()
        self._looking: asyncio.TimerHandle | None = None
        self._is_given_up = False
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._readable)

    @property
    def pid(self) -> int:
        """Return the process id of the template."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return True unless the template is known to have exited."""
        return self._control.fileno() != -1

    def ask(self, birth: Birth, spec: WorkerSpec, descriptors: tuple[int, ...], program: Program) -> None:
        """See `TemplateProcess.spawn`."""
        self._numbers += 1
        birth.forks, birth.number = self, self._numbers
        packet = msgspec.msgpack.encode(SpawnWorker(number=birth.number, spec=spec, program=program))
        assert len(packet) <= MAX_MESSAGE_BYTES, f"a specification of {len(packet)} bytes"
        try:
            socket.send_fds(self._control, [packet], descriptors)
        except BlockingIOError:  # it imports, and reads nothing yet
            self._send_later(packet, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dying: `_lost` follows
        self._births[birth.number] = birth
        self._await_answer()

    def _send_later(self, packet: bytes, descriptors: tuple[int, ...]) -> None:
        with contextlib.ExitStack() as closing:
            own = []
            for descriptor in descriptors:
                own.append(os.dup(descriptor))
                closing.callback(os.close, own[-1])
            self._unsent.append((packet, own, closing.pop_all()))
        asyncio.get_running_loop().add_writer(self._control, self._send_unsent)

    def _send_unsent(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                packet, descriptors, closing = self._unsent[0]
                socket.send_fds(self._control, [packet], descriptors)
                self._unsent.popleft()
                closing.close()
            asyncio.get_running_loop().remove_writer(self._control)

    def kill(self, birth: Birth) -> None:
        """See `Birth.kill`."""
        if birth.number not in self._births:
            return
        if birth.pid:
            _kill(birth.pid)
            return
        del self._births[birth.number]
        self._unwanted.add(birth.number)
        asyncio.get_running_loop().call_soon(birth.on_exited, -signal.SIGKILL, "")

    def stop(self) -> None:
        """End the template and every process that it forked."""
        if self.is_running:
            self._process.kill()
            self._lost()

    def _readable(self) -> None:
        try:
            packet = self._control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._lost()
            return
        message = msgspec.msgpack.decode(packet, type=FromTemplate)
        match message:
            case TemplateImporting():
                self.imported = message
            case WorkerForked():
                self._forked(message)
            case WorkerExited():
                self._unwanted.discard(message.number)
                if message.number in self._births:
                    self._exited(self._births[message.number], message.exit_code, "")

    def _forked(self, message: WorkerForked) -> None:
        self.imported = None
        if message.number in self._unwanted:
            _kill(message.pid)
            return
        birth = self._births[message.number]
        birth.pid = message.pid
        with contextlib.suppress(OSError):  # it has ended, or there are no descriptors: the template tells of its end
            birth.end = os.pidfd_open(message.pid)
            asyncio.get_running_loop().add_reader(birth.end, self._ended, birth)
        birth.on_forked(message.pid)

    def _ended(self, birth: Birth) -> None:
        """Note that a process ended; the template will report how."""
        birth.has_ended = True
        self._close_end(birth)
        if self._is_given_up:
            self._exited(birth, _exit_code(birth.pid), "")
        else:
            self._await_answer()

    def _exited(self, birth: Birth, exit_code: int | None, cause: str) -> None:
        del self._births[birth.number]
        self._close_end(birth)
        birth.on_exited(exit_code, cause)
        if self._is_given_up and not self._births:
            self.stop()

    def _close_end(self, birth: Birth) -> None:
        if birth.end is not None:
            asyncio.get_running_loop().remove_reader(birth.end)
            os.close(birth.end)
            birth.end = None

    # -- a template that stands still -------------------------------------------------------------------------------

    def _await_answer(self) -> None:
        if self._looking is None and not self._is_given_up:
            self._look_later(Onlooker(self.pid, "itself"))

    def _look_later(self, onlooker: Onlooker) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look, onlooker)

    def _look(self, onlooker: Onlooker) -> None:
        self._looking = None
        if not any(birth.has_ended or not birth.pid for birth in self._births.values()):
            return
        seen = onlooker.look()
        if seen.stopped_looks >= STOPPED_LOOKS:
            self._give_up(f"stopped for {STOPPED_LOOKS * LOOK_S:g} s")
        elif seen.idle_looks >= IDLE_LOOKS:
            self._give_up(f"idle for {IDLE_LOOKS * LOOK_S:g} s")
        else:
            self._look_later(onlooker)

    def _give_up(self, why: str) -> None:
        """Ask nothing more of it: those that it has forked live on."""
        self._is_given_up = True
        living = sum(bool(birth.pid) and not birth.has_ended for birth in self._births.values())
        log.error("the template process is %s: starting another; its %d processes keep running", why, living)
        self._on_done(self)
        for birth in list(self._births.values()):
            if birth.has_ended:
                self._exited(birth, _exit_code(birth.pid), "")
            elif not birth.pid:
                self._unwanted.add(birth.number)
                self._exited(birth, None, f"its template process is {why}")

    # -- its end ----------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """Clean up after the template's end: the kernel kills its children."""
        asyncio.get_running_loop().remove_reader(self._control)
        asyncio.get_running_loop().remove_writer(self._control)
        self._control.close()
        for _, _, closing in self._unsent:
            closing.close()
        self._unsent.clear()
        if self._looking is not None:
            self._looking.cancel()
        code = self._end()
        births, self._births = self._births, {}
        self._unwanted.clear()
        cause = f"its template process {end_in_words(code, self._fate.killer, self._lines.last)}"
        if births:
            log.error("the template process exited, and %d workers with it: %s", len(births), cause)
        if not self._is_given_up:
            self._on_done(self)
        for birth in births.values():
            if birth.pid:
                _kill(birth.pid)
            self._close_end(birth)
            birth.on_exited(None, cause)

    def _end(self) -> int:
        """Return the template's exit code: it has closed its wire, so it is ending, or else is killed now."""
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._lines.read_rest()
        return code


def _kill(pid: int) -> None:
    """Kill a process; one that has ended may be gone before the template's message about it is read."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has not been waited for; None if it cannot be read."""
    try:
        return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[49]))
    except (OSError, ValueError, IndexError):
        return None
