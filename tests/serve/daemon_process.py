"""A real daemon, as a user starts it: `melld serve` in its own process, with CPU workers."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from melld.control.client import ControlClient
from tests import worker_faults
from tests.forked import ForkedPython, run_melld
from tests.patience import PATIENCE_S

HAND_OVER = """
import os, runpy, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="api")
del sys.argv[:2]
runpy.run_module("melld", run_name="__main__", alter_sys=True)
"""


class DaemonProcess:
    """`melld serve` and its output.  Every wait is for a line or for the process's end, never for time to pass."""

    def __init__(
        self,
        model: Path | None,
        *arguments: str,
        environment: dict[str, str] | None = None,
        handed: socket.socket | None = None,
        program: Sequence[str] = ("-m", "melld"),
        genuine: bool = False,
        harmable: bool = False,
    ) -> None:
        """`model`: None if a file among the arguments names the models.

        `handed`: a listening socket that the daemon gets as file descriptor 3, as systemd hands it over.  A `genuine`
        daemon makes its imports itself, as a user's does; others, and their workers' templates, are forks of a process
        that has made them.

        `program`: what Python runs, for a daemon with a fault of its own.  `harmable`: its workers can be harmed.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="melld-")
        self.runtime_directory = Path(self._directory.name) / "run"
        self.faults = Path(self._directory.name) / "faults"
        """What its workers are to suffer (`tests.worker_faults`), if they are harmable."""
        self.faults.mkdir()
        harm = {worker_faults.VARIABLE: str(self.faults)} if harmable else {}
        command = [sys.executable, *program, "serve", "--port", "0"]
        command += [] if model is None else ["--model", str(model), "--name", "demo"]
        command += ["--runtime-directory", str(self.runtime_directory), *arguments]
        told = {"PYTHONUNBUFFERED": "1"} | harm
        if handed is not None:
            command = [sys.executable, "-c", HAND_OVER, str(handed.fileno()), *command[2:]]
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        start = subprocess.Popen if genuine else ForkedPython
        self.process = start(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | told | (environment or {}),
            pass_fds=() if handed is None else (handed.fileno(),),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._new.put(line.rstrip("\n"))
        self._new.put(None)

    def wait_for(self, text: str, deadline_s: float = PATIENCE_S) -> str:
        """Return the next line that holds `text`; fail with all output if the process ends before it."""
        while True:
            try:
                line = self._new.get(timeout=deadline_s)
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line with {text!r} came:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if text in line:
                return line

    def wait_ready(self) -> Self:
        """Return once it serves."""
        self.wait_for("melld: ready")
        self.url = self.wait_for("/v1").split()[-1].removesuffix("/v1")
        return self

    def wait_end(self, deadline_s: float = PATIENCE_S) -> int:
        """Return its exit code."""
        code = self.process.wait(deadline_s)
        while (line := self._new.get(timeout=deadline_s)) is not None:
            self.lines.append(line)
        return code

    def melld(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another `melld` command, told where this daemon is."""
        return run_melld(*words, "--runtime-directory", str(self.runtime_directory))

    def status(self) -> dict[str, Any]:
        """Return what `melld status --json` prints, without starting a process."""
        result: dict[str, Any] = json.loads(ControlClient([self.runtime_directory], answer_s=PATIENCE_S).status())
        return result

    def get(self, path: str) -> str:
        """Return the text at a path of the API."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:  # noqa: S310  a URL of ours
            return str(answer.read().decode())

    def stop(self) -> int:
        """End it as an operator would; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                return self.wait_end()
            finally:
                self.process.kill()
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        ended = self.process.poll()
        self.stop()
        self._reader.join()
        self._directory.cleanup()
        if failed is not None:  # else nobody asks what it said
            said = [*self.lines, *(self._new.get() or "" for _ in range(self._new.qsize()))]
            print(f"the daemon {'ran' if ended is None else f'had ended with {ended}'}:", *said, sep="\n")  # noqa: T201
