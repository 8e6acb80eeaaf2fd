"""Time per operation of every policy against the number of workers, ten requests on each.

    python -m benchmarks.packing.scheduler_scale [--workers 10,100] [--policies mell-plus,...] [--operations 2000]

An operation is an arrival or a departure on workers that are 80 % full.
Growth is one event for all requests and is reported per request.  Times are CPU time in microseconds; the table
is Markdown.
"""

import gc
import random
import statistics
import time

from benchmarks.harness import markdown, parser_of, record
from melld.scheduler import events
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import ALL_POLICIES

CAPACITY = 10_000_000
PER_WORKER = 10
GROWTH = 200  # bytes per request and epoch
WARM_UP_S = 5


class FilledScheduler:
    """A scheduler with `workers` awake, filled to `fullness`, and operations upon it that keep it so."""

    def __init__(self, policy: str, workers: int, fullness: float) -> None:
        self.random = random.Random(7)
        settings = SchedulerSettings(ClusterSettings(instant_moves=True, retire_after_s=1e9))
        self.scheduler = Scheduler(ALL_POLICIES[policy], settings)
        self.fullness, self.now_s, self.count = fullness, 0.0, 0
        self.sizes: dict[str, int] = {}
        self.names: list[str] = []
        for number in range(workers + workers // 2 + 2):
            self.scheduler.handle(events.WorkerUp(0.0, f"w{number}", CAPACITY))
        for _ in range(workers * PER_WORKER):
            self.arrive()
        for _ in range(WARM_UP_S):
            self.grow()
            self.scheduler.handle(events.EpochStarted(self.now_s))

    def arrive(self) -> float:
        """Let one request arrive; return the time in microseconds."""
        mean = CAPACITY * self.fullness / PER_WORKER
        self.count += 1
        name, size = f"r{self.count}", int(mean * self.random.uniform(0.2, 1.8))
        self.sizes[name] = size
        self.names.append(name)
        return self.timed(events.RequestArrived(self.now_s, name, size, prompt_tokens=size))

    def depart(self) -> float:
        """Let one request depart; return the time in microseconds."""
        at = self.random.randrange(len(self.names))
        self.names[at], self.names[-1] = self.names[-1], self.names[at]
        name = self.names.pop()
        del self.sizes[name]
        return self.timed(events.RequestFinished(self.now_s, name))

    def grow(self) -> float:
        """Let all requests grow; return the time in microseconds for each."""
        self.now_s += 1.0
        self.sizes = {name: size + GROWTH for name, size in self.sizes.items()}
        return self.timed(events.RequestsGrew(self.now_s, self.sizes)) / len(self.sizes)

    def epoch(self) -> float:
        """Run one epoch; return the time in microseconds."""
        return self.timed(events.EpochStarted(self.now_s))

    def timed(self, event: events.AnyEvent) -> float:
        """CPU microseconds to handle the event."""
        begun = time.thread_time_ns()
        self.scheduler.handle(event)
        return (time.thread_time_ns() - begun) / 1000


def measure(policy: str, workers: int, operations: int) -> list[str]:
    """Return one row of the table: median and p99 of an operation, growth per request, epoch per worker."""
    load = FilledScheduler(policy, workers, fullness=0.8)
    gc.collect()
    gc.disable()
    times = [step() for _ in range(operations // 2) for step in (load.depart, load.arrive)]
    rounds = max(3, min(20, 20_000 // workers))
    grown, epochs = [], []
    for _ in range(rounds):
        grown.append(load.grow())
        epochs.append(load.epoch() / workers)
    gc.enable()
    p99 = statistics.quantiles(times, n=100)[98]
    return [
        policy,
        f"{workers:,}",
        f"{statistics.median(times):.1f}",
        f"{p99:.1f}",
        f"{statistics.median(grown):.2f}",
        f"{statistics.median(epochs):.2f}",
    ]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", default="10,100,1000,10000")
    parser.add_argument("--policies", default=",".join(ALL_POLICIES))
    parser.add_argument("--operations", type=int, default=4000)
    given = parser.parse_args()
    rows = []
    for policy in given.policies.split(","):
        for workers in given.workers.split(","):
            rows.append(measure(policy, int(workers), given.operations))
            print(" | ".join(rows[-1]), flush=True)
    if given.write:
        columns = ["policy", "workers", "median µs", "p99 µs", "growth, µs per request", "epoch, µs per worker"]
        record("scheduler-scale", markdown(columns, rows), "one core")


if __name__ == "__main__":
    main()
