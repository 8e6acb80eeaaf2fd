"""GPUs against migrations: how far `mell-plus` can be pushed, and what knowing more would buy.

    python -m benchmarks.packing.frontier ../shared/traces --write

13B, LMSYS x10 at 1.1/s, the paper's time slots.  Each row is one setting of the policy, from few moves to many; each
column a way to choose who moves:

    plain      without any estimate of how long requests live: seconds mean what the settings say
    mell-plus  as shipped: the settings' seconds are scaled by the mean life of the requests that have ended
    residual   also moves only the half that is expected to stay longer, by the ended requests that lived as long
    oracle     the same with their true ends, which nobody knows
"""

import bisect
import concurrent.futures
import pathlib
import statistics
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.harness import machine_settings, markdown, parser_of, record
from benchmarks.packing.packing_cells import MACHINES, Cell, load_of
from melld.scheduler.cluster import Cluster, ClusterSettings
from melld.scheduler.events import AnyCommand, AnyEvent, MoveRequest, RequestFinished
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.plus.settings import BALANCED, PlusSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.state import Request, Worker
from melld.simulator.simulation import Simulation

SETTINGS = {
    "lean": PlusSettings(
        dispatch_life_s=20.0, enough_life_s=20.0, chain_life_s=8.0, push_life_s=8.0, drain_utilisation=0.9
    ),
    "lives of 20 s": msgspec.structs.replace(BALANCED, enough_life_s=20.0),
    "lives of 12 s": msgspec.structs.replace(BALANCED, enough_life_s=12.0),
    "default": BALANCED,
    "fuller": msgspec.structs.replace(BALANCED, drain_utilisation=0.97, drain_life_s=3.0),
    "tight": PlusSettings(
        dispatch_life_s=8.0, enough_life_s=3.0, drain_life_s=1.0, drain_utilisation=0.99, drain_attempts=12
    ),
}
AGES_S = [2.0 * 1.3**step for step in range(24)]
MOVABLE_SHARE = 2  # one in so many of a worker's requests, rounded up, may be moved where ends are estimated


class Plain(MellPlus):
    """`mell-plus` without its estimate."""

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:
        """Learn nothing."""


class Choosy(MellPlus):
    """Moves only requests that `stays_s` says will stay longest."""

    def stays_s(self, request: Request) -> float:
        """Return how much longer the request is thought to run."""
        raise NotImplementedError

    def _let_one_leave(self, worker: Worker, requests: list[Request], urgency_s: float) -> bool:
        staying = sorted(requests, key=self.stays_s, reverse=True)[: -(-len(requests) // MOVABLE_SHARE)]
        better = staying if self._best_move(worker, staying) is not None else requests
        return super()._let_one_leave(worker, better, urgency_s)


class Residual(Choosy):
    """The mean of what was left to ended requests when they were as old."""

    def __init__(self, cluster: Cluster, settings: PlusSettings) -> None:
        super().__init__(cluster, settings)
        self._left_s = [0.0] * len(AGES_S)
        self._count = [0] * len(AGES_S)

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:
        """Learn from one that has ended."""
        super().departed(request, worker, destination)
        lived_s = self.cluster.now_s - request.placed_s
        for index in range(bisect.bisect_right(AGES_S, lived_s)):
            self._left_s[index] += lived_s - AGES_S[index]
            self._count[index] += 1

    def stays_s(self, request: Request) -> float:
        """See `Choosy`."""
        index = max(bisect.bisect_right(AGES_S, self.cluster.now_s - request.placed_s) - 1, 0)
        return self._left_s[index] / self._count[index] if self._count[index] else 0.0


class Oracle(Choosy):
    """Knows every request's last token."""

    left_tokens: Callable[[str], float]

    def stays_s(self, request: Request) -> float:
        """Return it in tokens, which is the same order: those compared decode together."""
        return self.left_tokens(request.id)


WAYS: dict[str, type[MellPlus]] = {"plain": Plain, "mell-plus": MellPlus, "residual": Residual, "oracle": Oracle}


class Point(msgspec.Struct, frozen=True):
    """One simulation's outcome."""

    ratio: float
    migrations: float
    wasted: float
    """The part of all moves after which the request ended within ten seconds: they were wasted."""
    free: float
    gpus: float
    rate_per_s: float
    prompt: float
    final: float
    """Of requests, as parts of a worker's capacity."""


def simulate(way: str, setting: str, seed: int, traces: pathlib.Path) -> Point:
    """Simulate one hour under one policy."""
    settings = machine_settings(
        *MACHINES["13B"],
        epoch_s=1.0,
        paper_slots=True,
        seed=seed,
    )
    made: list[MellPlus] = []

    def policy(cluster: Cluster) -> MellPlus:
        made.append(WAYS[way](cluster, SETTINGS[setting]))
        return made[0]

    scheduler = Scheduler(policy, SchedulerSettings(cluster=ClusterSettings(instant_moves=True)))
    simulation = Simulation(settings, load_of(Cell("13B", "lmsys-1.1", way, seed), traces), scheduler)
    runs, running = simulation.fleet.runs, simulation.fleet.running
    if isinstance(made[0], Oracle):
        made[0].left_tokens = lambda name: running.output[runs[name].row] - running.generated[runs[name].row]
    watch = Watch(simulation)
    load = simulation.workload
    report = simulation.run().report(way)
    return Point(
        ratio=report.ratio,
        migrations=report.migrations_per_request,
        wasted=watch.wasted(),
        free=1.0 - report.utilisation,
        gpus=report.mean_gpus,
        rate_per_s=len(load) / report.window_s,
        prompt=statistics.mean(load.prompt_tokens) / settings.most_tokens,
        final=statistics.mean(map(sum, zip(load.prompt_tokens, load.output_tokens, strict=True)))
        / settings.most_tokens,
    )


class Watch:
    """When requests were moved, and when they ended."""

    def __init__(self, simulation: Simulation) -> None:
        self._moved_s: dict[str, list[float]] = {}
        self._after_s: list[float] = []
        self._handle = simulation.scheduler.handle
        simulation._decide = self._decide  # noqa: SLF001 - the benchmark listens, the simulator offers no hook for it

    def _decide(self, event: AnyEvent) -> Sequence[AnyCommand]:
        commands = self._handle(event)
        for command in commands:
            if type(command) is MoveRequest:
                self._moved_s.setdefault(command.request, []).append(event.at_s)
        if type(event) is RequestFinished:
            self._after_s += [event.at_s - at_s for at_s in self._moved_s.pop(event.request, ())]
        return commands

    def wasted(self) -> float:
        """Return the part of all moves after which the request ended within ten seconds."""
        return sum(after_s <= 10.0 for after_s in self._after_s) / max(len(self._after_s), 1)


def shown(points: list[Point]) -> str:
    """Ratio / migrations per request (moves wasted)."""
    ratio, moves, wasted = (mean(points, field) for field in ("ratio", "migrations", "wasted"))
    return f"{ratio:.3f} / {moves:.2f} ({100 * wasted:.0f} %)"


def mean(points: list[Point], field: str) -> float:
    """Over the seeds."""
    return statistics.mean(getattr(point, field) for point in points)


def text_of(points: dict[tuple[str, str], list[Point]]) -> str:
    """Return the table in Markdown."""
    return markdown(
        ["setting", *WAYS], [[setting, *(shown(points[way, setting]) for way in WAYS)] for setting in SETTINGS]
    )


def main() -> None:
    """Compute, print, write and draw."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    keys = [(way, setting) for way in WAYS for setting in SETTINGS]
    with concurrent.futures.ProcessPoolExecutor(arguments.processes) as pool:
        jobs = {
            key: [pool.submit(simulate, *key, seed, arguments.traces) for seed in range(arguments.seeds)]
            for key in keys
        }
        points = {key: [job.result() for job in found] for key, found in jobs.items()}
    text = text_of(points)
    print(text)
    if arguments.write:
        record("frontier", text)


if __name__ == "__main__":
    main()
