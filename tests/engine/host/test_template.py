"""The template process as the daemon sees it: what it makes may be gone before the daemon has heard of that."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from melld.engine.host.forks import Birth, Forks
from melld.engine.host.lines import OutputLines
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.spec import MAX_MESSAGE_BYTES, SpawnWorker, WorkerSpec
from tests.patience import PATIENCE_S


def a_process_that_has_ended() -> subprocess.Popen[bytes]:
    """Its number may be anybody's now."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return ended


async def test_killing_a_worker_that_has_just_ended_is_nothing() -> None:
    """Whoever looks for hung workers goes on looking when one of them dies in that moment by itself."""
    ended = a_process_that_has_ended()
    ours, theirs = socket.socketpair()
    forks = Forks(ended, ours, OutputLines(lambda _: None), lambda _: None)
    birth = Birth(lambda _pid: None, lambda _code, _cause: None)
    birth.forks, birth.pid = forks, ended.pid
    forks._births[birth.number] = birth  # the template has reaped it, and its word of that lies unread
    birth.kill()
    theirs.close()


async def end_of_a_template(harm: Callable[[int], None], **environment: str) -> str:
    """What is told of a worker whose template ends before it could be made."""
    template = TemplateProcess("cpu", environment)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    spec = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
    template.spawn(Birth(lambda _pid: None, lambda _code, cause: told.set_result(cause)), spec, (0, 0))
    assert template.pid is not None
    harm(template.pid)
    return await asyncio.wait_for(told, PATIENCE_S)


async def test_a_template_that_cannot_begin_is_told_with_its_last_word() -> None:
    """A broken installation is named, also where its last line is read only after its end."""
    cause = await end_of_a_template(lambda _pid: None, PYTHONHOME="/nonexistent")
    assert cause == "its template process exited with code 1: ModuleNotFoundError: No module named 'encodings'"


async def test_a_template_that_somebody_ends_is_told_with_the_signal() -> None:
    """Nothing that it printed has to do with it."""
    cause = await end_of_a_template(lambda pid: os.kill(pid, signal.SIGTERM))
    assert cause == "its template process ended by SIGTERM"


async def test_what_is_sent_to_the_daemons_process_group_does_not_reach_the_template() -> None:
    """Ctrl-C, a hang-up, the SIGTERM of `timeout` and some containers: the daemon answers, and ends its workers."""
    template = TemplateProcess("cpu", {})
    template.start()
    pid = template.pid or 0
    group = os.getpgid(pid)
    template.stop()
    assert group == pid


async def test_a_worker_that_could_not_be_asked_for_is_not_told_of_the_templates_end() -> None:
    """Its caller was told at once; the others must hear of the end."""
    template = TemplateProcess("cpu", {})
    told: list[int] = []
    spec = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
    for number, descriptors in enumerate([(9999, 9999), (0, 0)]):
        with contextlib.suppress(OSError):
            template.spawn(
                Birth(lambda _pid: None, lambda _code, _cause, who=number: told.append(who)), spec, descriptors
            )
    template.stop()
    assert told == [1]


async def test_more_workers_are_asked_for_than_its_socket_holds() -> None:
    """While it imports it reads nothing: on a machine with many cores the last ones were told of as failed to start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    lines = OutputLines(lambda _: None)
    os.close(lines.open())
    forks = Forks(a_process_that_has_ended(), ours, lines, lambda _: None)
    spec = WorkerSpec(worker="w0", model_path="m" * 500, device_kind="cpu")
    births = [Birth(lambda _pid: None, lambda _code, _cause: None) for _ in range(300)]
    for birth in births:
        forks.ask(birth, spec, (0, 1), "main")
    asked: list[int] = []
    while len(asked) < len(births) - 100:  # the rest is never read
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            packet, descriptors, _, _ = socket.recv_fds(theirs, MAX_MESSAGE_BYTES, 4)
            asked.append(msgspec.msgpack.decode(packet, type=SpawnWorker).number)
            for descriptor in descriptors:
                os.close(descriptor)
    assert asked == [birth.number for birth in births][: len(asked)]
    forks.stop()
    theirs.close()


async def test_a_template_that_cannot_be_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new try would take another from those that lack already."""
    pipes: list[tuple[int, int]] = []
    make = os.pipe
    monkeypatch.setattr(os, "pipe", lambda: pipes.append(make()) or pipes[-1])

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is to be had")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(BlockingIOError):
        TemplateProcess("cpu", {}).start()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipes[0][1])
