"""Counters of a running simulation, and the report made of them.

Owns counters, integrals over virtual time and samples (one per epoch, at most one a second).  Never changes what it
looks at.  Uses no wall-clock time: the same seed gives the same report.
"""

from array import array

import msgspec
import numpy as np

from melld.ids import RequestId
from melld.migrate.snapshot import Via
from melld.scheduler.priorities import CLASSES, class_of
from melld.simulator.bounds import lower_bound
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.run import Run
from melld.simulator.running import Floats
from melld.simulator.service import attainment, bound_gpu_s
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

SAMPLE_EVERY_S = 1.0


class Samples(msgspec.Struct):
    """Samples by column: time, GPUs awake, lower bound, bytes held."""

    at_s: list[float] = []
    gpus: list[int] = []
    bound: list[int] = []
    used_bytes: list[int] = []


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Floats) -> "Spread":
        """Return the spread of the values; all zero if there are none."""
        if seconds.size == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(seconds, [50, 90, 99]).tolist()
        return cls(float(seconds.mean()), p50, p90, p99, float(seconds.max()))


class ClassReport(msgspec.Struct, frozen=True):
    """Results of the requests of one class.  `latency_s`: from the arrival to the last token."""

    requests: int
    refused: int
    queueing_s: Spread
    ttft_s: Spread
    itl_s: Spread
    latency_s: Spread


class Counts(msgspec.Struct, kw_only=True):
    """Counts of events, kept as they happen."""

    refused: int = 0
    queued: int = 0
    window_s: float = 0.0
    end_s: float = 0.0
    peak_gpus: int = 0
    gpu_seconds: float = 0.0
    migrations: int = 0
    migrations_kv: int = 0
    migrations_between_machines: int = 0
    migrations_aborted: int = 0
    bytes_moved: int = 0
    preemptions: int = 0
    activations: int = 0


class Report(Counts, kw_only=True):
    """Results of one policy on one workload.

    Means over time, the ratio, the utilisation and the rates cover the window of arrivals (from zero to the last one);
    GPU-seconds, peaks and counts cover the whole run, until every request has ended.  The attainments, and the requests
    that meet both targets per GPU-second, are None without targets.  No schedule can go below `bound_gpu_seconds`.
    """

    policy: str
    seed: int
    requests: int
    mean_gpus: float
    bound_gpu_seconds: float
    attainment: float | None
    ttft_attainment: float | None
    itl_attainment: float | None
    goodput_per_gpu_second: float | None
    peak_bound: int
    mean_bound: float
    ratio: float
    migrations_per_s: float
    migrations_per_request: float
    utilisation: float
    preemptions_per_request: float
    activations_per_h: float
    queueing_s: Spread
    ttft_s: Spread
    itl_s: Spread
    displaced: int
    displaced_s: Spread
    """From a machine's loss until the tokens of each request displaced by it were computed elsewhere."""
    by_class: dict[str, ClassReport] = {}
    """By class, where the workload has priorities."""


class Measures:
    """Counters of one simulation."""

    def __init__(self, settings: SimulatorSettings, workload: Workload) -> None:
        self.settings = settings
        self.workload = workload
        self.samples = Samples()
        self.counts = Counts()
        self._moves_in_window = 0
        self._activations_in_window = 0
        self._gpus = 0
        self._gpus_since_s = 0.0
        self._next_sample_s = 0.0
        self.awake_gpu_s = 0.0
        self._lost_s: dict[RequestId, float] = {}  # when, of requests that have not resumed
        self._displaced_s = array("d")
        nothing = array("d", [float("nan")]) * len(workload)
        self.placed_s, self.first_token_s, self.end_times_s = nothing[:], nothing[:], nothing

    def finished(self, run: Run, now_s: float) -> None:
        """Record the times of a request that has ended."""
        index = run.index
        self.placed_s[index] = run.placed_s
        self.first_token_s[index] = run.first_token_s
        self.end_times_s[index] = now_s
        self.counts.gpu_seconds = self.awake_gpu_s + self._gpus * (now_s - self._gpus_since_s)

    def moved(self, via: Via, kv_bytes: int, between_machines: bool) -> None:
        """Count a finished migration."""
        self.counts.migrations += 1
        self.counts.migrations_between_machines += between_machines
        if via is Via.KV:
            self.counts.migrations_kv += 1
            self.counts.bytes_moved += kv_bytes

    def activated(self, now_s: float, gpus: int) -> None:
        """Count a woken worker; `gpus` are awake now."""
        self.counts.activations += 1
        self.count_gpus(now_s, gpus)

    def lost(self, now_s: float, displaced: list[Run], gpus: int) -> None:
        """Count a lost machine's requests; `gpus` are awake now."""
        self._lost_s.update((run.id, now_s) for run in displaced)
        self.count_gpus(now_s, gpus)

    def resumed(self, run: Run, at_s: float) -> None:
        """Count a request whose tokens will be computed again at that time."""
        if (lost_s := self._lost_s.pop(run.id, None)) is not None:
            self._displaced_s.append(at_s - lost_s)

    def sample(self, now_s: float, fleet: SimulatedFleet) -> None:
        """Take a sample if one is due."""
        if now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + SAMPLE_EVERY_S * (1 - 1e-9)
        running, samples = fleet.running, self.samples
        rows = running.held_rows()  # preempted requests need no worker now; they are counted apart
        sizes = running.all_told_bytes[rows]
        bound = max(lower_bound(sizes, self.settings.capacity_bytes), -(-rows.size // self.settings.slots))
        samples.at_s.append(now_s)
        samples.gpus.append(self._gpus)
        samples.bound.append(bound)
        samples.used_bytes.append(int(sizes.sum()))

    def last_arrival(self, now_s: float) -> None:
        """End the window of arrivals."""
        self.counts.window_s = now_s
        self._moves_in_window = self.counts.migrations
        self._activations_in_window = self.counts.activations

    def end(self, now_s: float) -> None:
        """End the simulation."""
        self.count_gpus(now_s, self._gpus)
        self.counts.end_s = now_s

    def report(self, policy: str) -> Report:
        """Return the report; call `end` first."""
        samples = self.samples
        inside = np.array(samples.at_s) <= self.counts.window_s
        gpus, bound, used = (np.array(column)[inside] for column in (samples.gpus, samples.bound, samples.used_bytes))
        window_s = max(self.counts.window_s, 1e-9)
        load = self.workload
        arrived, outputs = np.array(load.arrival_s), np.array(load.output_tokens)
        placed, first, ended = map(np.array, (self.placed_s, self.first_token_s, self.end_times_s))
        more = outputs > 1
        requests = len(load)
        met = attainment(self.settings, load, first, ended)
        return Report(
            **msgspec.structs.asdict(self.counts),
            policy=policy,
            seed=self.settings.seed,
            requests=requests,
            mean_gpus=float(gpus.mean()) if gpus.size else 0.0,
            bound_gpu_seconds=bound_gpu_s(self.settings, load),
            attainment=met.both,
            ttft_attainment=met.ttft,
            itl_attainment=met.itl,
            goodput_per_gpu_second=None if met.served is None else _quotient(met.served, self.counts.gpu_seconds),
            peak_bound=max(samples.bound, default=0),
            mean_bound=float(bound.mean()) if bound.size else 0.0,
            ratio=_quotient(float(gpus.sum()), float(bound.sum())),
            migrations_per_s=self._moves_in_window / window_s,
            migrations_per_request=_quotient(self.counts.migrations, requests),
            utilisation=_quotient(float(used.sum()), float(gpus.sum()) * self.settings.capacity_bytes),
            preemptions_per_request=_quotient(self.counts.preemptions, requests),
            activations_per_h=self._activations_in_window / window_s * 3600,
            queueing_s=Spread.of(_known(placed - arrived)),
            ttft_s=Spread.of(_known(first - arrived)),
            itl_s=Spread.of(_known((ended - first)[more] / (outputs[more] - 1))),
            displaced=len(self._displaced_s),
            displaced_s=Spread.of(np.array(self._displaced_s)),
            by_class=self._by_class(placed, first, ended) if load.priority else {},
        )

    def _by_class(self, placed: Floats, first: Floats, ended: Floats) -> dict[str, ClassReport]:
        load, found = self.workload, {}
        classes = np.array([class_of(priority) for priority in load.priority])
        arrived, outputs = np.array(load.arrival_s), np.array(load.output_tokens)
        for name, number in CLASSES.items():
            here = classes == number
            if not here.any():
                continue
            more = here & (outputs > 1)
            found[name] = ClassReport(
                requests=int(here.sum()),
                refused=int(np.isnan(ended[here]).sum()),
                queueing_s=Spread.of(_known((placed - arrived)[here])),
                ttft_s=Spread.of(_known((first - arrived)[here])),
                itl_s=Spread.of(_known((ended - first)[more] / (outputs[more] - 1))),
                latency_s=Spread.of(_known((ended - arrived)[here])),
            )
        return found

    def count_gpus(self, now_s: float, gpus: int) -> None:
        """Note that `gpus` are awake now."""
        self.awake_gpu_s += self._gpus * (now_s - self._gpus_since_s)
        self._gpus_since_s = now_s
        self._gpus = gpus
        self.counts.peak_gpus = max(self.counts.peak_gpus, gpus)


def _known(seconds: Floats) -> Floats:
    known: Floats = seconds[~np.isnan(seconds)]
    return known


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
