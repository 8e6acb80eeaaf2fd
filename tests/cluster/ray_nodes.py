"""Ray nodes on addresses of this machine, without root, and their processes."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
TOKEN = "0123456789abcdef" * 3
MARK = "MELLD_TEST_RAY"
ENGINE = ("torch", "vllm")
RAY = Path(sys.executable).with_name("ray")


class Process(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    parent: int
    line: str
    environment: list[bytes]


class RayNodes:
    """A head, and nodes that join it; each has so many of `melld_device`.  All its processes end with it."""

    def __init__(self, auth_mode: str = "token", *, with_engine: bool = True) -> None:
        """`with_engine`: without it neither PyTorch nor vLLM can be imported there, which takes a template seconds."""
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        with socket.socket() as taken:
            taken.bind((HEAD, 0))
            self.address = f"{HEAD}:{taken.getsockname()[1]}"
        self.environment = {
            MARK: self._directory,
            "RAY_AUTH_MODE": auth_mode,
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_TMPDIR": self._directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        }
        if not with_engine:
            self._hide(*ENGINE)

    def _hide(self, *packages: str) -> None:
        hiding = Path(self._directory) / "hiding"
        hiding.mkdir()
        for package in packages:
            (hiding / f"{package}.py").write_text("raise ModuleNotFoundError(f'{__name__} is hidden')\n")
        paths = (str(hiding), os.environ.get("PYTHONPATH"))
        self.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        here = os.getpid()  # whose own children may be another cluster's
        while there := [one.pid for one in self._all() if one.parent != here]:
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self, node: str, devices: int = 1) -> None:
        """Start a node; the head is the first."""
        own = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        words = own if node == HEAD else [f"--address={self.address}"]
        words += ["--num-cpus=0", "--num-gpus=0", f'--resources={{"melld_device": {devices}}}', "--disable-usage-stats"]
        words += ["--include-log-monitor=false", "--no-monitor"]  # nothing of melld's needs these processes
        done = subprocess.run(
            [RAY, "start", f"--node-ip-address={node}", "--object-store-memory=80000000", *words],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self, *words: str) -> list[int]:
        """The processes of these nodes, and melld's there and here, with all the words in their command lines."""
        return [one.pid for one in self._all() if all(word in one.line for word in words)]

    def _all(self) -> Iterator[Process]:
        """Return the processes that carry our mark in their environment, and their descendants."""
        found = {one.pid: one for one in all_processes()}
        mark, here = f"{MARK}={self._directory}".encode(), os.getpid()
        for one in found.values():
            family = [one, *(found[pid] for pid in ancestors(one.pid) if pid in found)]
            is_ours = any(mark in each.environment for each in family if each.pid != here)
            if one.pid != here and (is_ours or (one.parent == here and "melld: " in one.line)):
                yield one

    def of_node(self, node: str, word: str) -> int:
        """The process with the word on a node: its raylet, or a child or grandchild of that."""
        (raylet,) = self.processes("raylet/raylet", f"--node_ip_address={node}")
        found = [pid for pid in self.processes(word) if raylet in (pid, *ancestors(pid))]
        assert len(found) == 1, found
        return found[0]


def all_processes() -> Iterator[Process]:
    """Return every live process of this machine that may be inspected."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            pid = int(directory.name)
            if line:
                yield Process(pid, parent_of(pid), line, environment_of(pid))


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ancestors(pid: int) -> Iterator[int]:
    """A process's parent, its parent's, and so on."""
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = parent_of(pid)
            yield pid
