"""`subprocess`, for Python programs that import vLLM or melld: forked from the nursery, which has them imported.

Owns the nursery's life: it is started by whoever first needs it, and ends with that process.
"""

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
VARIABLE = "MELLD_TEST_NURSERY"
"""In the environment of processes whose nursery was started by another."""
MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 17, 16


class Program(NamedTuple):
    """What a fork is to run: the words after the interpreter's name, and the numbers of the descriptors sent along."""

    words: list[str]
    directory: str
    environment: dict[str, str]
    numbers: list[int]


@functools.cache
def nursery() -> str:
    """Return its address, starting it if need be."""
    if VARIABLE not in os.environ:
        address = f"melld-nursery-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen(128)
            words = [sys.executable, "-m", "tests.nursery", str(listener.fileno())]
            started = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),), start_new_session=True
            )
        atexit.register(started.communicate)  # closes its input, which ends it
        os.environ[VARIABLE] = address
    return f"\0{os.environ[VARIABLE]}"


class ForkedPython(subprocess.Popen[Any]):
    """A Python program whose words begin with `sys.executable`, then `-m MODULE` or `-c CODE`."""

    def _execute_child(self, *given: Any) -> None:
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.connect(nursery())
        ForkedPython.send(self, self._asked, *given)
        self.pid = int(self._asked.recv(64))

    def send(self: Any, asked: socket.socket, *given: Any) -> None:
        """Send what `subprocess` gives its own `_execute_child`."""
        (words, _executable, _preexec, _close, passed, directory, environment, _startup, _flags, _shell) = given[:10]
        pipes = given[10:16]
        standard = [pipes[0], pipes[3], pipes[5]]
        sent = [number if found == -1 else found for number, found in enumerate(standard)] + list(passed)
        program = Program(
            words=[os.fspath(word) for word in words[1:]],
            directory=str(directory or Path.cwd()),
            environment=dict(environment if environment is not None else os.environ),
            numbers=[0, 1, 2, *passed],
        )
        socket.send_fds(asked, [json.dumps(program._asdict()).encode()], sent)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._asked], [], [], 0)[0]:
            return 0, 0
        status = int(self._asked.recv(64) or 9)  # the nursery was killed, and its children with it
        self._asked.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run_python(*words: str, input: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: A002
    """Return what `subprocess.run` gives of a Python program, with its output as text."""
    command = [sys.executable, *words]
    stdin = None if input is None else subprocess.PIPE
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ForkedPython(command, **pipes | options) as process:
        try:
            out, err = process.communicate(input)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_melld(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return a `melld` command's output and exit code."""
    return run_python("-m", "melld", *words, **options)


if __name__ == "__main__":  # in the place of an interpreter: `python tests/forked.py [OPTION ...] -c CODE`
    with ForkedPython([sys.executable, *sys.argv[-2:]]) as forked:
        sys.exit(forked.wait())
