"""The template's loop: what goes wrong with one worker is that worker's."""

import os
import socket

import msgspec
import pytest

from melld.engine.wire.spec import MAX_MESSAGE_BYTES, FromTemplate, SpawnWorker, WorkerExited, WorkerSpec
from melld.engine.worker.template import Template


def test_a_fork_that_fails_is_the_failed_start_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes or memory the others go on: they would end with the template."""

    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    with ours, theirs, os.fdopen(read_end, "rb") as printed:
        spec = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
        Template(theirs)._fork(SpawnWorker(number=7, spec=spec), [os.dup(write_end), write_end])
        answer = msgspec.msgpack.decode(ours.recv(MAX_MESSAGE_BYTES), type=FromTemplate)
        assert answer == WorkerExited(number=7, exit_code=1)
        assert printed.read() == b"OSError: [Errno 11] Resource temporarily unavailable\n"
