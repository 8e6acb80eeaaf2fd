"""The template process as the daemon sees it: a child may be gone before the daemon hears of it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from melld.engine.host import template as templates
from melld.engine.host.lines import OutputLines
from melld.engine.host.local_process import LocalProcess
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.spec import WorkerSpec
from tests.patience import PATIENCE_S

SPEC = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
MISSING = """
def __getattr__(name):
    raise ModuleNotFoundError
"""
ALMOST_NOTHING = f"""
{MISSING}
class cuda:
    _is_in_bad_fork = bool
"""
WITHOUT_FORK = f"""
{ALMOST_NOTHING}
import os

def fail():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fail
"""


@contextlib.asynccontextmanager
async def template() -> AsyncIterator[TemplateProcess]:
    """Return a template that has not been started."""
    made = TemplateProcess("cpu")
    try:
        yield made
    finally:
        made.stop()


async def end_of(asked: TemplateProcess, harm: Callable[[int], None] = lambda _: None) -> tuple[int | None, str]:
    """Return what is reported of a process whose template is harmed before the fork."""
    told: asyncio.Future[tuple[int | None, str]] = asyncio.get_running_loop().create_future()
    asked.spawn(LocalProcess(lambda _: None, lambda *end: told.set_result(end)), SPEC, (0, 1))
    assert asked.pid is not None
    harm(asked.pid)
    return await asyncio.wait_for(told, PATIENCE_S)


def descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def replace_torch(code: str, path: Path, patch: pytest.MonkeyPatch) -> None:
    """Make templates import this code as torch, and nothing else that takes long."""
    for package, text in {"torch": code, "transformers": MISSING, "vllm": MISSING}.items():
        (path / package).mkdir()
        (path / package / "__init__.py").write_text(text)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))


def test_processes_are_made_by_torch_multiprocessing() -> None:
    """The context is torch's own, under another name."""
    assert torch.multiprocessing.get_context("forkserver") is templates.CONTEXT


async def test_a_template_that_cannot_start_is_reported_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation is named, even if its last line is read only after its end."""
    replace_torch("raise RuntimeError('the driver is of another age')", tmp_path, monkeypatch)
    async with template() as broken:
        code, cause = await end_of(broken)
    assert (code, cause) == (
        1,
        "its template process exited with code 1: RuntimeError: the driver is of another age",
    )


async def test_a_killed_template_is_reported_with_the_signal() -> None:
    """Nothing that it printed has to do with it."""
    async with template() as ended:
        code, cause = await end_of(ended, lambda pid: os.kill(pid, signal.SIGTERM))
    assert (code, cause) == (-signal.SIGTERM, "its template process ended by SIGTERM")


async def test_a_failed_fork_is_one_worker_s_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes or memory the template ends, and the others go on; the next start makes another."""
    replace_torch(WITHOUT_FORK, tmp_path, monkeypatch)
    async with template() as without:
        for _ in range(2):
            code, cause = await end_of(without)
            assert (code, cause.partition(": ")[2]) == (
                1,
                "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            )


async def test_a_process_is_reported_from_its_fork_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including its output, which says why it ended, and even if its template hangs then."""
    replace_torch(ALMOST_NOTHING, tmp_path, monkeypatch)
    said: asyncio.Queue[Any] = asyncio.Queue()
    async with template() as asked, asyncio.timeout(PATIENCE_S):
        for harm in (0, signal.SIGSTOP):
            output = OutputLines(lambda _: None)
            process = LocalProcess(said.put_nowait, lambda *end: said.put_nowait(end))
            with os.fdopen(output.open(), "wb", 0) as write_end:
                asked.spawn(process, SPEC, (0, write_end.fileno()))
            pid = await said.get()
            assert pid == process.pid > 0
            assert asked.pid is not None
            if harm:
                os.kill(asked.pid, harm)
            assert await said.get() == (1, "")
            output.read_rest()
            assert output.last[-1] == "OSError: [Errno 88] Socket operation on non-socket"
            output.close()
            process.kill()  # nothing


async def test_signals_to_the_daemon_s_process_group_miss_the_template() -> None:
    """Ctrl-C, a hang-up, the SIGTERM of `timeout` and some containers: the daemon answers, and ends its workers."""
    async with template() as own:
        own.start()
        assert own.pid is not None
        while not own.progress():
            assert os.getpgid(own.pid) in (os.getpgid(0), own.pid)
            await asyncio.sleep(0)
        assert os.getpgid(own.pid) == own.pid


async def test_a_worker_that_could_not_be_requested_hears_nothing_of_the_end() -> None:
    """Its caller was told at once; the others must hear of the template's end, and none is lost."""
    told: asyncio.Queue[int] = asyncio.Queue()

    def tell(number: int, _exit_code: int | None, _cause: str) -> None:
        told.put_nowait(number)

    async with template() as asked:
        processes = [LocalProcess(lambda _: None, partial(tell, number)) for number in range(300)]
        with pytest.raises(OSError, match="Bad file descriptor"):
            asked.spawn(processes[0], SPEC, (9999, 9999))
        for process in processes[1:]:
            asked.spawn(process, SPEC, (0, 1))
    async with asyncio.timeout(PATIENCE_S):
        assert sorted([await told.get() for _ in processes[1:]]) == list(range(1, 300))


async def test_killing_an_unforked_process_counts_as_its_end() -> None:
    """Whoever stops a worker need not wait for the imports; the template's end is not reported after that."""
    told: list[tuple[int | None, str]] = []
    async with template() as asked:
        process = LocalProcess(lambda _: None, lambda *end: told.append(end))
        asked.spawn(process, SPEC, (0, 1))
        process.kill()
        process.kill()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == [(-signal.SIGKILL, "")]


async def test_a_template_that_cannot_be_started_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each retry would take another of the few that are left."""

    def fail(*_: object) -> int:
        raise BlockingIOError("no process is to be had")

    monkeypatch.setattr(util, "spawnv_passfds", fail)
    async with template() as asked:
        with pytest.raises(BlockingIOError):
            asked.start()  # what is left of earlier ones is gone then
        before = descriptors()
        with pytest.raises(BlockingIOError):
            asked.start()
        assert descriptors() == before
