"""The template process as the daemon sees it: started before the first worker, and again after its death.

Owns that process and the workers asked of it.  Never reads what a worker sends.  `melld.engine.worker.template` runs
in it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from melld.engine.host.fate import Fate, end_in_words
from melld.engine.host.lines import OutputLines
from melld.engine.wire.spec import WorkerSpec
from melld.engine.wire.template import MAX_MESSAGE_BYTES, FromTemplate, Program, SpawnWorker, WorkerExited, WorkerForked

log = logging.getLogger("melld.template")
ENDING_S = 0.2
"""How long a process may take from closing its wire to its end."""
BEGIN = (
    "import sys; sys.path[:] = {path!r}; from melld.engine.worker.template import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


class Birth:
    """A worker that was asked for.  `pid` is 0 until it is forked."""

    def __init__(
        self, number: int, on_forked: Callable[[int], None], on_exited: Callable[[int | None, str], None]
    ) -> None:
        self.number = number
        self.pid = 0
        self.on_forked = on_forked
        self.on_exited = on_exited


class TemplateProcess:
    """Starts worker processes.  To be used on the event loop's thread, which must be the main one."""

    def __init__(self, device_kind: str, environment: Mapping[str, str]) -> None:
        self._device_kind = device_kind
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._births: dict[int, Birth] = {}
        self._unwanted: set[int] = set()
        self._numbers = 0
        self._fate = Fate()
        self._lines = OutputLines(self._printed)

    @property
    def pid(self) -> int | None:
        """Process id of the template; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the template unless it runs.  Its imports take seconds; it forks workers when they are done."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lines = OutputLines(self._printed)
        write_end = self._lines.open()
        code = BEGIN.format(path=[entry or str(Path.cwd()) for entry in sys.path])
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), self._device_kind],
                pass_fds=(theirs.fileno(),),
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
            )
        except OSError:  # no process or memory is left for it now
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write_end)
        ours.setblocking(False)
        self._control = ours
        self._fate = Fate()
        asyncio.get_running_loop().add_reader(ours, self._readable)

    def spawn(
        self,
        spec: WorkerSpec,
        descriptors: tuple[int, int],
        on_forked: Callable[[int], None],
        on_exited: Callable[[int | None, str], None],
        program: Program = "main",
    ) -> Birth:
        """Have a process forked that runs `program`; `descriptors` (its wire, its log) may be closed afterwards.

        Calls `on_forked(pid)`, then `on_exited(exit_code, cause)`; `cause` is "" if only the exit code is known.
        """
        self.start()
        assert self._control is not None
        self._numbers += 1
        birth = Birth(self._numbers, on_forked, on_exited)
        packet = msgspec.msgpack.encode(SpawnWorker(number=birth.number, spec=spec, program=program))
        assert len(packet) <= MAX_MESSAGE_BYTES, f"a specification of {len(packet)} bytes"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dying: `_lost` follows
            socket.send_fds(self._control, [packet], descriptors)
        self._births[birth.number] = birth
        return birth

    def kill(self, birth: Birth) -> None:
        """Kill a worker; one that is not forked yet counts as ended now and is killed when it appears."""
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
        if self._process is not None:
            self._process.kill()
            self._lost()

    def _readable(self) -> None:
        assert self._control is not None
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
            case WorkerForked():
                self._forked(message)
            case WorkerExited():
                self._unwanted.discard(message.number)
                birth = self._births.pop(message.number, None)
                if birth is not None:
                    birth.on_exited(message.exit_code, "")

    def _forked(self, message: WorkerForked) -> None:
        if message.number in self._unwanted:
            _kill(message.pid)
            return
        birth = self._births[message.number]
        birth.pid = message.pid
        birth.on_forked(message.pid)

    def _lost(self) -> None:
        """Clean up after the template's end: the kernel kills its children, and the next `spawn` starts another."""
        assert self._control is not None
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        code = self._end()
        self._process = self._control = None
        births, self._births = self._births, {}
        self._unwanted.clear()
        cause = f"its template process {end_in_words(code, self._fate.killer, self._lines.last)}"
        if births:
            log.error("the template process is gone, and %d workers with it: %s", len(births), cause)
        for birth in births.values():
            if birth.pid:
                _kill(birth.pid)
            birth.on_exited(None, cause)

    def _end(self) -> int:
        """Return the template's exit code: it has closed its wire, so it is ending, or else is killed now."""
        assert self._process is not None
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._lines.read_rest()
        return code

    def _printed(self, line: str) -> None:
        log.debug("template: %s", line)


def _kill(pid: int) -> None:
    """Kill a worker; one that has ended may be gone before the template's message about it is read."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
