"""Workers lost at every step of a move: the fault, its victim, and the required outcome.

The suite plays a few of the losses; `make chaos ARGS="--matrix"` plays them all.  A loss that did not happen is a
failure: the fault's file must be gone, and the migration's story must tell of it.
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from melld.control.client import ControlRefused
from tests.migrate.live import CASES, CHUNK_S, Bench, Stream
from tests.patience import PATIENCE_S
from tests.worker_faults import slowed

DIED = {"source": "source died", "destination": "destination died"}
LATE = "deadline passed"
SOURCE_POINTS = ("described", "freezing", "frozen", "releasing")
DESTINATION_POINTS = ("reserved", "copying", "copied", "attaching", "attached")


class Loss(msgspec.Struct, frozen=True):
    """Faults, each (who, at which point, what); whoever is killed as the first strikes; the expected story."""

    faults: tuple[tuple[str, str, str], ...]
    told: tuple[frozenset[str], ...]
    """Of each set, one at least."""
    via: str = "kv"
    then_killed: str | None = None
    committed: bool = False
    then_goes_on: bool = False
    """Whoever was stopped, once the other's death is known."""
    after_first_token: bool = False
    """The move follows a prompt: one of several chunks."""

    @property
    def name(self) -> str:
        """Return a name for a test's id and for a line of the long form."""
        done = " and ".join(f"{role} {point} {what}" for role, point, what in self.faults)
        way = "after the first token" if self.after_first_token else self.via
        after = f", then {self.then_killed} KILL" if self.then_killed else ""
        return f"{way}: {done}{after}" + (", then CONT" if self.then_goes_on else "")


def _killed(role: str, point: str, via: str = "kv") -> Loss:
    return Loss(((role, point, "KILL"),), (frozenset({DIED[role]}),), via, None, point == "releasing")


def _stopped(role: str, point: str) -> Loss:
    """Return the loss for a stopped worker; either its death or the deadline may come first."""
    return Loss(((role, point, "STOP"),), (frozenset({DIED[role], LATE}),), "kv", None, point == "releasing")


def _both(role: str, point: str) -> Loss:
    other = "source" if role == "destination" else "destination"
    told = (frozenset(DIED.values()),)
    return Loss(((role, point, "KILL"),), told, "kv", other, point == "releasing")


def _killed_before_the_release(via: str) -> Loss:
    """Return the loss of the destination right after the takeover; the source releases after that."""
    told = (frozenset({DIED["destination"]}),)
    return Loss((("source", "releasing", "STOP"),), told, via, "destination", committed=True, then_goes_on=True)


MATRIX = (
    *(_killed("source", point) for point in SOURCE_POINTS),
    *(_killed("destination", point) for point in DESTINATION_POINTS),
    *(_killed("source", point, "tokens") for point in SOURCE_POINTS),
    *(_killed("destination", point, "tokens") for point in ("warmed", "reserved", "attaching", "attached")),
    # Rolled back, and then lost as well.
    Loss(
        (("destination", "attaching", "KILL"), ("source", "thawing", "KILL")),
        (frozenset({DIED["destination"]}), frozenset({DIED["source"]})),
    ),
    Loss(
        (("destination", "attached", "STOP"), ("source", "thawing", "KILL")),
        (frozenset({LATE}), frozenset({DIED["source"]})),
    ),
    Loss(
        (("destination", "pulled", "CORRUPT"), ("destination", "cancelling", "KILL")),
        (frozenset({"copy failed"}), frozenset({DIED["destination"]})),
    ),
    *(_both("destination", point) for point in DESTINATION_POINTS),
    _both("source", "releasing"),
    _killed_before_the_release("kv"),
    _killed_before_the_release("tokens"),
    *(_stopped("source", point) for point in SOURCE_POINTS),
    *(_stopped("destination", point) for point in DESTINATION_POINTS),
)
"""For a daemon that checks what it copies."""

_ORDINARY = (
    *(_killed("source", point) for point in ("following", "followed", "freezing", "frozen", "releasing")),
    *(_killed("destination", point) for point in DESTINATION_POINTS),
    Loss(
        (("destination", "attaching", "KILL"), ("source", "thawing", "KILL")),
        (frozenset({DIED["destination"]}), frozenset({DIED["source"]})),
    ),
    *(_both("destination", point) for point in ("copied", "attached")),
    _both("source", "following"),
    _stopped("source", "following"),
    _stopped("source", "frozen"),
    _stopped("destination", "copied"),
)
HAND_OVERS = tuple(msgspec.structs.replace(loss, after_first_token=True) for loss in _ORDINARY)
"""At every step of a hand-over after the first token."""
FEW_HAND_OVERS = (HAND_OVERS[0], HAND_OVERS[8])

FEW = (
    _killed("source", "frozen"),
    _killed("destination", "warmed", "tokens"),
    _killed("destination", "attached"),
    Loss(
        (("destination", "attaching", "KILL"), ("source", "thawing", "KILL")),
        (frozenset({DIED["destination"]}), frozenset({DIED["source"]})),
    ),
    _stopped("destination", "copied"),
    _killed_before_the_release("tokens"),
)
"""The long suite's share: frozen, computing ahead, with the commit unsaid, both, hung in a copy, just committed."""
FEWEST = (FEW[0], FEW[1], FEW[4])
"""The short one's: a source, a destination, a hang."""


def suffer(bench: Bench, loss: Loss) -> list[str]:
    """Play the loss; return what was not as it must be."""
    name = "long prompt" if loss.after_first_token else "thinking"
    unmoved = bench.unmoved(name)
    with slowed(bench.faults, CHUNK_S if loss.after_first_token else 0.0):
        if loss.after_first_token:
            stream, one = bench.seen_prefilling(bench.body(name), loss.name)
        else:
            stream = Stream(bench.daemon, CASES[name] | {"cache_salt": loss.name})  # its blocks are nowhere else
            stream.wait_chunks(12)
            [one] = bench.operator.requests_of(stream)
        workers = {"source": one["worker"], "destination": "w1" if one["worker"] == "w0" else "w0"}
        pids = {worker["worker"]: int(worker["pid"]) for worker in bench.operator.status()["workers"]}
        files = [bench.faults / f"{workers[role]}.{point}.{what}" for role, point, what in loss.faults]
        for file in files:
            file.touch()
        follower = None
        if loss.then_killed is not None:
            follower = threading.Thread(target=_follow, args=(bench, files[0], workers[loss.then_killed], pids, loss))
            follower.start()
        wrong = _moved(bench, one["request"], workers["destination"], loss)
    if stream.result() != unmoved:
        wrong.append(f"another answer: {stream.answer} instead of {unmoved}")
    wrong += [f"never met: {file.name}" for file in files if file.exists()]
    for file in files:
        file.unlink(missing_ok=True)
    if follower is not None:
        follower.join()
    bench.operator.wait_ready()
    bench.operator.wait_idle()
    return wrong


def _moved(bench: Bench, request: str, worker: str, loss: Loss) -> list[str]:
    try:
        via = None if loss.after_first_token else loss.via
        report: Any = bench.operator.migrate(request, worker, via, after_first_token=loss.after_first_token)
    except ControlRefused as refused:
        return [f"the move was not begun: {refused}"]
    wrong = [f"{set(signs)} not in {report}" for signs in loss.told if not signs & _signs(report)]
    if (report["outcome"] == "committed") != loss.committed:
        wrong.append(f"ended otherwise: {report}")
    return wrong


def _signs(report: Any) -> set[str]:
    """Drop the time from `12.3 ms source died`."""
    return {line.split(" ms ", 1)[1] for line in report["story"]}


def _follow(bench: Bench, file: Path, victim: str, pids: dict[str, int], loss: Loss) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while file.exists() and time.monotonic() < end_s:
        time.sleep(0.0005)  # another process takes it away: there is nothing to wait on
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[victim], signal.SIGKILL)
    if loss.then_goes_on:
        bench.operator.wait_gone(victim, pids[victim])
        [other] = set(pids) - {victim}
        os.kill(pids[other], signal.SIGCONT)
