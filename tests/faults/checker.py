"""The one judge of a fault's effect: whatever was injected, the same questions are asked of the history.

terminal outcomes   each request has exactly one: an answer, a refusal, an error event, or a client that left
tokens              an answer is, to the letter, that of a run without faults
owners              the decision log, read by an auditor that shares no code with the daemon, shows one owner each
blocks              all are free once it is quiet
processes           no process of ours is left ten seconds after the end
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.decisions.audit import Auditor
from tests.faults.reader import Reader
from tests.migrate.live import CALM, LONGEST_PAUSE_S, Operator
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess

ANSWERS = frozenset({"stop", "length"})


class Subject:
    """A daemon under test, its fault-free answers, and every process that it has had."""

    def __init__(self, daemon: DaemonProcess, model: Path, decisions: Path, faults: Path) -> None:
        self.daemon = daemon
        self.model = model
        self.decisions = decisions
        self.faults = faults
        self.operator = Operator(daemon)
        self.key: str | None = None
        """With which runs without faults are made."""
        self._unharmed: dict[str, str] = {}
        self._pids: set[int] = set()

    def read(self, body: dict[str, Any], key: str | None = None) -> Reader:
        """Start a client that asks and reads."""
        return Reader(self.daemon.url, body, key)

    def unharmed(self, body: dict[str, Any]) -> str:
        """Return the fault-free answer; ask for it first.  A salt changes what is cached, and no answer."""
        name = repr(sorted((key, value) for key, value in body.items() if key not in ("cache_salt", "priority")))
        if name not in self._unharmed:
            reader = self.read(body, self.key).wait_end()
            assert set(reader.ends) <= ANSWERS, reader.ends
            self._unharmed[name] = reader.text
        return self._unharmed[name]

    def worker(self, name: str) -> Any:
        """Return the worker's status."""
        return next(one for one in self.status()["workers"] if one["worker"] == name)

    def worker_of(self, reader: Reader) -> str:
        """Return where its request runs."""
        [one] = [one for one in self.status()["requests"] if reader.id and reader.id in one["request"]]
        return str(one["worker"])

    def status(self) -> Any:
        """Return what `melld status` would say, remembering its processes."""
        status = self.operator.status()
        self._pids |= {worker["pid"] for worker in status["workers"] if worker["pid"]}
        self._pids |= set(descendants(self.daemon.process.pid))
        return status

    def until(self, holds: Callable[[Any], Any], deadline_s: float = PATIENCE_S) -> Any:
        """Ask until it holds; return the status for which it did."""
        end_s, pause_s = time.monotonic() + deadline_s, 0.01
        while not holds(status := self.status()):
            assert time.monotonic() < end_s, status
            time.sleep(pause_s)  # another process: asking it is the only way to know
            pause_s = min(1.3 * pause_s, LONGEST_PAUSE_S)
        return status

    def judge(self, readers: Sequence[Reader], refusals: Iterable[str] = ()) -> list[str]:
        """Return what is wrong with this history; failures must begin with one of `refusals`."""
        wrong = []
        for number, reader in enumerate(readers):
            reader.wait_end()
            where = f"request {number} ({reader.id})"
            if reader.left:
                continue
            if len(reader.ends) != 1:
                wrong.append(f"{where}: {len(reader.ends)} ends: {reader.ends}")
            elif reader.ends[0] not in ANSWERS:
                if not any(reader.ends[0].startswith(refusal) for refusal in refusals):
                    wrong.append(f"{where}: {reader.ends[0]}")
                elif reader.text:
                    wrong.append(f"{where}: it had begun, and was ended with {reader.ends[0]}")
            elif reader.text != self.unharmed(reader.body):
                wrong.append(f"{where}: other tokens than without faults")
        return wrong + self.judge_quiet()

    def judge_quiet(self) -> list[str]:
        """Return what is held though nothing runs."""
        left = [file.name for file in self.faults.iterdir()]
        try:
            self.until(lambda status: all(worker["state"] in CALM for worker in status["workers"]))
            self.until(lambda status: not status["requests"] and not held(status))
        except AssertionError as error:
            return [f"held though nothing runs: {error}", *left]
        return [f"the fault {name} was never met" for name in left]

    def judge_end(self) -> list[str]:
        """Return what is wrong once the daemon has ended: with its log, and with what it leaves behind."""
        self.status()
        code = self.daemon.stop()
        wrong = [] if code == 0 else [f"exit code {code}"]
        with self.decisions.open("rb") as lines:
            wrong += Auditor().read(lines).faults
        return wrong + [f"process {pid} is left" for pid in orphans(self._pids)]


def held(status: Any) -> int:
    """Return blocks used or reserved anywhere."""
    return sum(worker["used_blocks"] + worker["reserved_blocks"] for worker in status["workers"])


def descendants(pid: int) -> list[int]:
    """Return all processes below this one."""
    found, waiting = [], [pid]
    while waiting:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                found += (children := [int(word) for word in task.read_text().split()])
                waiting += children
    return found


def orphans(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that live after ten seconds; a zombie waiting for its parent counts as gone."""
    end_s = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if is_there(pid)]) and time.monotonic() < end_s:
        time.sleep(0.1)  # processes of another process: there is nothing to wait on
    return left


def is_there(pid: int) -> bool:
    """Return True if the process runs, or could."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
