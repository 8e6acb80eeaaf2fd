"""What a soak promises, judged from what was counted while all was quiet.

memory        of the daemon, its template and its workers does not rise once they are warm (`Trend.is_flat`)
descriptors   and threads, tasks: `soak_meters.climbs`
shared memory nobody maps the KV of a process that is gone; no file of /dev/shm outlives the daemon
event loop    99 of 100 timers fire within `DELAY_S`
"""

import collections
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from benchmarks.faults.soak_meters import Reading, Trend, climbs, read_all, trend
from tests.faults.checker import Subject

DELAY_S = 0.05
DELAYS, TASKS, MIGRATIONS = "melld_event_loop_delay_seconds", "melld_event_loop_tasks", "melld_migrations_total"
OWN_DESCRIPTORS = 5
"""Of the daemon for each worker process: its wire, what it prints, its end, and two of `multiprocessing`."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether one promise is kept (None: that cannot be told), and by what figures."""

    promise: str
    is_kept: bool | None
    figures: str


class Quiet(msgspec.Struct, frozen=True):
    """One moment without a request: every worker sleeps, or has no process.  Counters are since the daemon's start."""

    at_s: float
    readings: list[Reading]
    tasks: int
    delays: dict[str, int]
    """How many timers of the traffic before it were late by at most so many seconds, by bucket."""
    longest_delay_s: float
    moves: dict[str, float]
    restarts: int

    @classmethod
    def of(cls, subject: Subject, status: Any, delays: dict[str, int]) -> Self:
        """Now."""
        values = metrics(subject)
        return cls(
            at_s=time.monotonic(),
            readings=read_all(subject.daemon.process.pid, subject.status()),
            tasks=int(values[TASKS]),
            delays=delays,
            longest_delay_s=values["melld_event_loop_delay_max_seconds"],
            moves={name.partition("{")[2][:-1]: value for name, value in values.items() if name.startswith(MIGRATIONS)},
            restarts=sum(worker["restarts"] for worker in status["workers"]),
        )

    @property
    def daemon(self) -> Reading:
        """Return the daemon's own reading."""
        return next(reading for reading in self.readings if reading.role == "daemon")

    @property
    def workers(self) -> list[Reading]:
        """Those of its workers."""
        return [reading for reading in self.readings if reading.role.startswith("w")]


def metrics(subject: Subject) -> dict[str, float]:
    """Return what the daemon counts, by name and labels."""
    samples = [line.rpartition(" ") for line in subject.daemon.get("/metrics").splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in samples}


def delays(subject: Subject) -> collections.Counter[str]:
    """Return how many timers have been late by at most so many seconds since the start, by bucket."""
    buckets = {name: value for name, value in metrics(subject).items() if name.startswith(f"{DELAYS}_bucket")}
    return collections.Counter({name.split('"')[1]: int(value) for name, value in buckets.items()})


def verdicts(quiets: Sequence[Quiet], warm_up_s: float) -> list[Verdict]:
    """Judge all that can be judged from these moments."""
    if not quiets:
        return [Verdict("it came to a pause", False, "there was none")]
    readings = [reading for quiet in quiets for reading in quiet.readings]
    lives: dict[tuple[str, int], list[Reading]] = {}
    for reading in readings:
        lives.setdefault((reading.role, reading.pid), []).append(reading)
    return [
        *_memory(lives, warm_up_s),
        *_counts(quiets, lives),
        _nobody_holds_the_dead(quiets),
        _dev_shm(readings),
        _event_loop(quiets),
    ]


def _memory(lives: dict[tuple[str, int], list[Reading]], warm_up_s: float) -> Iterable[Verdict]:
    """Judge each role over its lives, and new workers by their birth: they begin as their template is."""
    for role, belongs in (
        ("daemon", lambda name: name == "daemon"),
        ("template", lambda name: name == "template"),
        ("workers, each over its life,", lambda name: name.startswith("w")),
    ):
        mine = [life for (name, _), life in lives.items() if belongs(name)]
        warm = [[(one.at_s, float(one.rss_bytes)) for one in life if one.age_s > warm_up_s] for life in mine]
        yield _flat(f"memory of the {role} is flat", trend(warm))
    firsts = sorted((life[0].at_s, float(life[0].rss_bytes)) for (name, _), life in lives.items() if name[0] == "w")
    yield _flat("memory of young workers is that of young workers before them", trend([firsts]))


def _flat(promise: str, found: Trend | None) -> Verdict:
    if found is None:
        return Verdict(promise, None, "too few points, or too close together, to tell")
    return Verdict(promise, found.is_flat, found.in_mib())


def _counts(quiets: Sequence[Quiet], lives: dict[tuple[str, int], list[Reading]]) -> Iterable[Verdict]:
    of_daemon = [quiet.daemon.descriptors - OWN_DESCRIPTORS * len(quiet.workers) for quiet in quiets]
    yield _steady("descriptors of the daemon, but for those of its workers", of_daemon)
    template = [
        one.descriptors - len(quiet.workers) for quiet in quiets for one in quiet.readings if one.role == "template"
    ]
    yield _steady("descriptors of the template, but for those of its children", template)
    yield _steady("threads of the daemon", [quiet.daemon.threads for quiet in quiets])
    yield _steady("tasks of the daemon", [quiet.tasks for quiet in quiets])
    workers = [life for (name, _), life in lives.items() if name.startswith("w")]
    youngest = sorted(workers, key=lambda life: life[0].at_s - life[0].age_s)
    oldest = max(workers, key=len, default=[])
    measures: tuple[tuple[str, Callable[[Reading], int]], ...] = (
        ("descriptors", lambda reading: reading.descriptors),
        ("threads", lambda reading: reading.threads),
    )
    for what, measure in measures:
        yield _steady(f"{what} of the worker seen longest", [measure(one) for one in oldest])
        yield _steady(f"{what} of workers first seen one after the other", [measure(life[0]) for life in youngest])


def _steady(what: str, counts: Sequence[int]) -> Verdict:
    told = f"{min(counts)} to {max(counts)}, at last {counts[-1]}; {len(counts)} times" if counts else "never seen"
    return Verdict(f"no more and more {what}", not climbs(counts), told)


def _nobody_holds_the_dead(quiets: Sequence[Quiet]) -> Verdict:
    """Judge that there are no more KV memories than workers."""
    held = [len(frozenset().union(*(one.kv_memories for one in quiet.readings))) for quiet in quiets]
    spare = [count - len(quiet.workers) for count, quiet in zip(held, quiets, strict=True)]
    told = f"at most {max(held)} mapped by {max(len(quiet.workers) for quiet in quiets)} workers, {max(spare)} too many"
    return Verdict("nobody keeps the KV memory of a worker that is gone", max(spare) <= 0, told)


def _dev_shm(readings: Iterable[Reading]) -> Verdict:
    """Judge the files, once the daemon has ended."""
    used = frozenset().union(*(reading.dev_shm for reading in readings))
    left = sorted(file for file in used if Path(file).exists())
    return Verdict("no file of /dev/shm is left", not left, f"{len(used)} used, {len(left)} left {left[:3]}")


def _event_loop(quiets: Sequence[Quiet]) -> Verdict:
    """Judge the delays under traffic; the first round, which does everything for the first time, does not count."""
    total: collections.Counter[str] = collections.Counter()
    for quiet in quiets[1:]:
        total.update(quiet.delays)
    if not total:
        return Verdict(f"p99 of the event loop's delay is under {DELAY_S * 1e3:.0f} ms", None, "one round alone")
    late = sorted((float(bucket), count) for bucket, count in total.items())
    count = late[-1][1]
    part = next(within for bound, within in late if bound == DELAY_S) / max(1.0, count)
    p99_s = next((bound for bound, within in late if within >= 0.99 * count), math.inf)
    longest_s = max(quiet.longest_delay_s for quiet in quiets)
    told = f"{part:.4%} of {count:.0f} are, p99 at most {p99_s * 1e3:.0f} ms, longest {longest_s:.2f} s"
    return Verdict(f"p99 of the event loop's delay is under {DELAY_S * 1e3:.0f} ms", part >= 0.99, told)
