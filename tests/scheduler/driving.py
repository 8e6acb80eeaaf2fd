"""Small helpers that put a scheduler into a known state."""

from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import ALL_POLICIES

CAPACITY = 1000


def scheduler_with(
    workers: int = 2,
    policy: str = "best-fit",
    slots: int = 100,
    cluster: ClusterSettings | None = None,
    per_machine: int = 100,
) -> Scheduler:
    """Return a scheduler with sleeping workers w0, w1, ... of 1000 bytes, the first `per_machine` on one machine."""
    scheduler = Scheduler(ALL_POLICIES[policy], SchedulerSettings(cluster or ClusterSettings()))
    for number in range(workers):
        scheduler.handle(e.WorkerUp(0.0, f"w{number}", CAPACITY, slots, number // per_machine))
    return scheduler


def arrive(scheduler: Scheduler, name: str, kv_bytes: int, at_s: float = 0.0, priority: int = 0) -> list[e.AnyCommand]:
    """Let one request arrive."""
    return scheduler.handle(e.RequestArrived(at_s, name, kv_bytes, kv_bytes, priority))


def finish(scheduler: Scheduler, name: str, at_s: float = 0.0) -> list[e.AnyCommand]:
    """Let one request end."""
    return scheduler.handle(e.RequestFinished(at_s, name))


def placed(commands: list[e.AnyCommand]) -> dict[str, str]:
    """Return the placements: request to worker."""
    return {c.request: c.worker for c in commands if isinstance(c, e.PlaceRequest)}


def moved(commands: list[e.AnyCommand]) -> dict[str, str]:
    """Return the moves: request to destination."""
    return {c.request: c.destination for c in commands if isinstance(c, e.MoveRequest)}


def of_kind(commands: list[e.AnyCommand], kind: type) -> list[e.AnyCommand]:
    """Return the commands of one kind, in order."""
    return [command for command in commands if isinstance(command, kind)]


def lay_out(scheduler: Scheduler, *loads: dict[str, int], growth_bytes_s: float = 0.0) -> None:
    """Wake w0, w1, ... and put exactly these requests there, whatever the policy thinks; each grows at this rate."""
    cluster = scheduler.cluster
    for number, sizes in enumerate(loads):
        worker = cluster.workers[WorkerId(f"w{number}")]
        cluster.activate(worker, Reason.SERVICE)
        worker.growth_bytes_s = growth_bytes_s
        for name, kv_bytes in sizes.items():
            event = e.RequestArrived(cluster.now_s, RequestId(name), kv_bytes, kv_bytes)
            cluster.assign(cluster.add_request(event), worker, Reason.ARRIVAL)
    cluster.take_commands()
