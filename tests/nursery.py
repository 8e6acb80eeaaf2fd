"""A process with the daemon's and workers' imports done, which forks a Python program whenever a test asks.

Owns the imports, which are most of what a daemon's start takes, and its children; a child's program cannot tell the
difference, but for the time.  `tests.forked` is its client.  A child that is to be a daemon gets its workers' template
process in the same way: a fork made beforehand, since the daemon will have threads by the time it needs one.

Ends, and with it all children, when its standard input does: with the tests, whatever ends those.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib import metadata
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import setproctitle
from hypothesis.internal.conjecture import providers

from melld.daemon.renewal import old
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from melld.engine.vllm_options import option_kinds
from melld.engine.worker.forking import has_one_thread, preload
from melld.engine.worker.start import die_with_parent
from tests import daemon_faults, worker_faults
from tests.forked import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, ForkedPython, Program

IMPORTS = (
    "uvloop",
    "melld.cluster.agent",
    "melld.cli.check_config",
    "melld.cli.serve",
    "melld.cli.simulation.command",
    "melld.cli.status",
    "melld.daemon.lifecycle",
    "melld.api.app",
    "melld.api.guards.media",
    "melld.api.serving.fit",
    "melld.engine.frontend.frontend",
    "melld.engine.frontend.prepared",
    "melld.engine.frontend.rehearsal",
    "melld.engine.frontend.vllm_metrics",
    # What vLLM imports as it builds a front end.
    "pydantic.v1",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.generative_scoring.serving",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.generate.structured_decisions.serving",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.scale_out.derender.serving",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.scale_out.render.serving",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.tool_parsers.hermes_tool_parser",
    # What each process of the tests imports.
    "_hypothesis_pytestplugin",
    "httpx",
    "hypothesis.internal.conjecture.providers",
    "hypothesis.stateful",
    "melld.cli.status_tables",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "xdist.remote",
)
TEMPLATES = 2
"""Fork servers that each daemon has beforehand."""
CLEAR_OF_THE_REST = 64
"""Descriptors that came are put above it and all their numbers, before each gets the number that it was sent for."""


class Nursery:
    """The loop: takes orders, reaps children, and reports both."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._asking: set[socket.socket] = set()
        self._children: dict[int, tuple[socket.socket, int]] = {}  # descriptor of the child's end: who asked, its pid

    def serve(self) -> "tuple[Program, list[int]] | None":
        """Return None once the tests are gone; in a child, its program."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    return None
                elif key.fileobj is self._listener:
                    asking, _ = self._listener.accept()
                    self._asking.add(asking)
                    self._selector.register(asking, selectors.EVENT_READ)
                elif key.fd in self._children:
                    self._reap(key.fd)
                elif isinstance(key.fileobj, socket.socket) and (told := self._heard(key.fileobj)) is not None:
                    return told

    def _heard(self, asking: socket.socket) -> "tuple[Program, list[int]] | None":
        try:
            packet, descriptors, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionResetError:  # it has gone without having read how its program ended
            packet, descriptors = b"", []
        if not packet:
            self._selector.unregister(asking)
            self._asking.discard(asking)
            asking.close()
            return None
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(nursery)
            self._leave()
            return Program(**json.loads(packet)), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        end = os.pidfd_open(pid)
        self._children[end] = (asking, pid)
        self._selector.register(end, selectors.EVENT_READ)
        asking.send(str(pid).encode())
        return None

    def _leave(self) -> None:
        """In a child: close what belonged to the nursery alone."""
        self._selector.close()
        self._listener.close()
        for asking in self._asking:
            asking.close()
        for end in self._children:
            os.close(end)

    def _reap(self, end: int) -> None:
        asking, pid = self._children.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            asking.send(str(status).encode())


def become(program: Program, descriptors: list[int]) -> None:
    """Run the program as a fresh interpreter would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _place(descriptors, program.numbers)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.directory)
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        at_once = bool(program.environment.get("PYTHONUNBUFFERED"))
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr, write_through=at_once)
    if {"serve", "agent"} & set(program.words):
        util.spawnv_passfds = fork_templates(TEMPLATES)
        sys.orig_argv = [sys.executable, *program.words]
        old.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": ForkedPython})  # type: ignore[attr-defined]
    if worker_faults.VARIABLE in program.environment:
        worker_faults.inject(Path(program.environment[worker_faults.VARIABLE]))
        if "serve" in program.words:
            daemon_faults.inject(Path(program.environment[worker_faults.VARIABLE]))
    option, *words = program.words
    if option == "-m":
        sys.argv, sys.path[0] = words, str(Path.cwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        assert option == "-c", program.words
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)  # noqa: S102  what `python -c` does


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give each descriptor the number that the program knows it by."""
    import fcntl

    above = max([CLEAR_OF_THE_REST, *(number + 1 for number in numbers)])
    lifted = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(lifted, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def fork_templates(number: int) -> Callable[[Any, Sequence[Any], Any], int]:
    """Replace `multiprocessing`'s interpreter start by pre-forked fork servers.

    Later ones make their imports themselves.
    """
    waiting = [_fork_beforehand() for _ in range(number)]
    genuine = util.spawnv_passfds

    def start(path: Any, words: Sequence[Any], passed: Any) -> int:
        if not waiting or "multiprocessing.forkserver" not in words[-1]:
            return genuine(path, words, passed)
        pid, asked = waiting.pop()
        numbers = [0, 1, 2, *passed]
        program = Program(list(words[-2:]), str(Path.cwd()), dict(os.environ), numbers)
        with asked:
            socket.send_fds(asked, [json.dumps(program._asdict()).encode()], numbers)
        return pid

    return start


def _fork_beforehand() -> tuple[int, socket.socket]:
    """Fork a child that waits for its program, and return the socket to send it by."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        ours.close()
        packet, descriptors, _, _ = socket.recv_fds(theirs, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        theirs.close()
        if not packet:
            os._exit(0)
        run_and_exit(Program(**json.loads(packet)), descriptors)
    theirs.close()
    return pid, ours


def run_and_exit(program: Program, descriptors: list[int]) -> NoReturn:
    """Run it and exit, without the second that the interpreter takes to destroy its modules one by one."""
    code = 1
    try:
        become(program, descriptors)
        code = 0
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forget_exits() -> None:
    """Drop what the imports have registered for the exit of each program, unless it is quick.

    Torch would take its operators down one by one, and Ray its connection, which no fork has made: a tenth of a second.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    if ray := sys.modules.get("ray._private.worker"):
        atexit.unregister(ray.shutdown)


def main(listener: socket.socket) -> None:
    """Import, then serve the socket's clients."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' Ctrl-C: their end is ours
    setproctitle.getproctitle()  # which finds where the name stands, before any environment is changed
    os.environ.update(COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
    gc.disable()
    preload("cpu")
    for name in IMPORTS:
        importlib.import_module(name)
    option_kinds()
    sys.modules["melld.api.serving.fit"].leave_unknown_fields()  # half of what a daemon's loop does before it is ready
    metadata.entry_points = functools.cache(metadata.entry_points)  # vLLM reads those of all packages twice a worker
    with warnings.catch_warnings(action="ignore"):  # it is slow, which is why it is done once
        providers._get_local_constants()  # of melld's sources: each process of the tests would read them
    forget_exits()
    gc.collect()
    gc.freeze()
    gc.enable()
    assert has_one_thread(), "a fork would lack the other threads"
    told = Nursery(listener).serve()
    if told is not None:
        run_and_exit(*told)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
