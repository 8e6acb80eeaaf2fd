"""The template process as the daemon sees it: started before the first worker, and again after its death.

Owns its starts; `forks` has what one run of it makes.  `melld.engine.worker.template` runs in it.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from melld.engine.host.forks import Birth, Forks
from melld.engine.host.lines import OutputLines
from melld.engine.wire.spec import Program, WorkerSpec
from melld.kvstore.process_meter import UNREADABLE

log = logging.getLogger("melld.template")
BEGIN = (
    "import sys; sys.path[:] = {path!r}; from melld.engine.worker.template import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


class TemplateProcess:
    """Starts worker processes.  To be used on the event loop's thread, which must be the main one."""

    def __init__(self, device_kind: str, environment: Mapping[str, str]) -> None:
        self._device_kind = device_kind
        self._environment = dict(environment)
        self._forks: Forks | None = None
        self._given_up: list[Forks] = []

    @property
    def pid(self) -> int | None:
        """Process id of the template; None while there is none."""
        return self._forks.pid if self._forks is not None else None

    def progress(self) -> str:
        """Say how far its imports are; empty once it forks, or before it has said anything."""
        if self._forks is None or (seen := self._forks.imported) is None:
            return ""
        read = ""
        with contextlib.suppress(*UNREADABLE):
            io = psutil.Process(self._forks.pid).io_counters()
            read = f", {max(io.read_chars, io.read_bytes) >> 20:,} MiB read"
        return f"{seen.done} of {seen.parts} parts imported, {seen.modules:,} modules{read}"

    def spawn(self, birth: Birth, spec: WorkerSpec, descriptors: tuple[int, ...], program: Program = "main") -> None:
        """Have a process forked that runs `program`.

        `descriptors` (its wire, its log, those of its arena's chunks) may be closed afterwards.
        """
        self.start().ask(birth, spec, descriptors, program)

    def stop(self) -> None:
        """End the template and every process that it forked."""
        for forks in [*self._given_up, *filter(None, [self._forks])]:
            forks.stop()

    def start(self) -> Forks:
        """Start the template unless it runs.  Its imports take seconds; it forks workers when they are done."""
        if self._forks is not None:
            return self._forks
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lines = OutputLines(lambda line: log.debug("template: %s", line))
        write_end = lines.open()
        code = BEGIN.format(path=[entry or str(Path.cwd()) for entry in sys.path])
        try:
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), self._device_kind],
                pass_fds=(theirs.fileno(),),
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                process_group=0,  # what a terminal, or `timeout`, sends to the daemon's is the daemon's to answer
            )
        except OSError:  # no process or memory is left for it now
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write_end)
        self._forks = Forks(process, ours, lines, self._done)
        return self._forks

    def _done(self, forks: Forks) -> None:
        """Start another template for the next requested process."""
        self._forks = None
        self._given_up = [one for one in self._given_up if one.is_running]
        if forks.is_running:
            self._given_up.append(forks)
