"""The template process: `multiprocessing`'s fork server, which imports what workers need before forking them.

Owns its starts and its end.  `melld.engine.worker.forking` runs in it, and first of all in its children.  Those end
with the daemon, not with the template: one that dies, or stands still for too long, is replaced.
"""

import asyncio
import contextlib
import logging
import multiprocessing.process
import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

import msgspec
import psutil

from melld.engine.host.child import Descriptor, begin
from melld.engine.host.fate import Fate, end_in_words
from melld.engine.host.lines import OutputLines
from melld.engine.host.local_process import LocalProcess
from melld.engine.host.standstill import Onlooker
from melld.engine.wire.spec import TEMPLATE_TITLE, TEMPLATE_VARIABLE, Program, TemplateSpec, WorkerSpec
from melld.kvstore.process_meter import UNREADABLE

log = logging.getLogger("melld.template")
CONTEXT = multiprocessing.get_context("forkserver")
"""That of `torch.multiprocessing`, which a cluster's agent would need 270 MiB more to name: it imports no torch."""
PRELOAD = ["melld.engine.preload"]
ENDING_S = 0.2
"""How long a template may take from closing its socket to its end."""
LOOK_S = 1.0
STOPPED_LOOKS = 5
IDLE_LOOKS = 60
"""Looks that must find it stopped, or idle, while it is to fork; it may be importing from a slow disk."""


class TemplateProcess:
    """Starts worker processes.  To be used on the event loop's thread, which must be the main one.

    Workers get this process's environment, and then their own.
    """

    def __init__(self, device_kind: str) -> None:
        self.pid: int | None = None
        """None while there is none."""
        self._lines = OutputLines(lambda line: log.debug("template: %s", line))
        self._output = self._lines.open()
        told = TemplateSpec(device_kind, os.getpid(), f"/proc/{os.getpid()}/fd/{self._output}")
        os.environ[TEMPLATE_VARIABLE] = msgspec.json.encode(told).decode()
        self._thread = ThreadPoolExecutor(1, "starts of processes")
        self._awaited: set[LocalProcess] = set()
        self._followed = 0
        """The last one's pid."""
        self._has_forked = False
        self._last_end: tuple[int | None, str] = (None, "")
        self._looking: asyncio.TimerHandle | None = None

    def progress(self) -> str:
        """Report the progress of its imports; empty before the first report and after the last."""
        if self.pid is None:
            return ""
        with contextlib.suppress(*UNREADABLE):
            template = psutil.Process(self.pid)
            _, is_importing, imported = "".join(template.cmdline()).partition(f"{TEMPLATE_TITLE}: ")
            io = template.io_counters()
            return f"{imported}, {max(io.read_chars, io.read_bytes) >> 20:,} MiB read" if is_importing else ""
        return ""

    def start(self) -> None:
        """Start the template unless it runs.  It forks processes once its imports are done, which takes seconds."""
        if resource_tracker._resource_tracker._fd is None:  # type: ignore[attr-defined]  # noqa: SLF001
            # A tracker would outlive this process, whose stand-in ends with the last one's exit code.
            resource_tracker._resource_tracker._fd = os.open(os.devnull, os.O_WRONLY)  # type: ignore[attr-defined]  # noqa: SLF001
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        self._follow()

    def spawn(
        self, process: LocalProcess, spec: WorkerSpec, descriptors: tuple[int, ...], program: Program = "main"
    ) -> None:
        """Fork a process that runs `program`.

        `descriptors` (its wire, its output, those of its arena's chunks) may be closed afterwards.
        """
        self.start()
        with contextlib.ExitStack() as closing:
            own = []
            for descriptor in descriptors:
                own.append(Descriptor(os.dup(descriptor)))
                closing.callback(os.close, own[-1].number)
            arguments = (program, msgspec.msgpack.encode(spec), own)
            child = CONTEXT.Process(target=begin, args=arguments, name=spec.worker)
            starting = asyncio.get_running_loop().run_in_executor(self._thread, _start, child)
            starting.add_done_callback(partial(self._started, process, child, self.pid, closing.pop_all()))
        self._awaited.add(process)
        if self._looking is None:
            self._look_later(None)

    def stop(self) -> None:
        """End the template and drop its pending forks; its children end with this process at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._looking is not None:
            self._looking.cancel()
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            select.select([self._end], [], [])
            self._forget()
        self._thread.shutdown()
        os.close(self._output)
        self._lines.close()

    def _follow(self) -> None:
        """Watch the current template for its end."""
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # noqa: SLF001
        if pid in (None, self._followed):
            return
        if self.pid is not None:
            self._ended()
        self._end = os.pidfd_open(pid)
        self.pid = self._followed = pid
        self._has_forked, self._fate = False, Fate()
        self._lines.last.clear()
        asyncio.get_running_loop().add_reader(self._end, self._ended)

    def _started(
        self,
        process: LocalProcess,
        child: BaseProcess,
        template: int | None,
        descriptors: contextlib.ExitStack,
        starting: asyncio.Future[None],
    ) -> None:
        """Report that the template with this pid forked a process, or failed to; close its descriptors here."""
        descriptors.close()
        self._awaited.discard(process)
        try:
            starting.result()
        except (EOFError, ConnectionError):  # the template is gone
            if self.pid == template and select.select([self._end], [], [], ENDING_S)[0]:
                self._ended()
            process.not_forked(*self._last_end)
        except asyncio.CancelledError:
            process.not_forked(None, "melld is stopping")
        except (OSError, ValueError) as error:  # no memory or descriptors, or too many of these
            process.not_forked(None, f"no process could be started: {error}")
        else:
            self._follow()
            self._has_forked = True
            process.forked(child)

    # -- a template that stands still, or ends ----------------------------------------------------------------------

    def _look_later(self, onlooker: Onlooker | None) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look, onlooker)

    def _look(self, onlooker: Onlooker | None) -> None:
        self._looking = None
        if not self._awaited:
            return
        self._follow()
        if self.pid is None:
            self._look_later(None)
            return
        if onlooker is None or onlooker.pid != self.pid:
            onlooker = Onlooker(self.pid, "itself")
        seen = onlooker.look()
        if seen.stopped_looks >= STOPPED_LOOKS:
            log.error("the template process was stopped for %g s, continuing it", STOPPED_LOOKS * LOOK_S)
            os.kill(self.pid, signal.SIGCONT)
        elif seen.idle_looks >= IDLE_LOOKS:
            log.error("the template process was idle for %g s, killing it", IDLE_LOOKS * LOOK_S)
            os.kill(self.pid, signal.SIGKILL)
        self._look_later(onlooker)

    def _ended(self) -> None:
        code = None
        with contextlib.suppress(ChildProcessError):  # `multiprocessing` has waited for it before
            ended = os.waitid(os.P_PIDFD, self._end, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._lines.read_rest()
        how = end_in_words(code, self._fate.killer, self._lines.last)
        self._last_end = code, f"its template process {how}"
        log.error("the template process %s; its workers keep running", how)
        self._forget()
        if self._has_forked:  # the next process need not wait for the imports
            with contextlib.suppress(OSError):  # it then starts the template itself
                self.start()

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        self.pid = None


def _start(child: BaseProcess) -> None:
    """Fork the child, after waiting for the template's imports."""
    child.start()
    # Else `multiprocessing` waits for it at this interpreter's exit, and takes its exit code in any other thread.
    multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]  # noqa: SLF001
