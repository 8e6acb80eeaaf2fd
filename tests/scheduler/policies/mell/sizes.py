"""Harness of MELL, unbatched or batched, on many equal workers with instant moves."""

from collections.abc import Mapping

from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.mell.classes import FULL_SIXTHS, TINY, WEIGHT_SIXTHS, L, Limits, M, S, T
from melld.scheduler.policies.mell.policy import Mell
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from tests.scheduler.law import check_cluster

CAPACITY = 2400
LIMITS = Limits.of(CAPACITY)


class Packing:
    """A scheduler with MELL, the sizes that it was given, and the moves that it made."""

    def __init__(
        self, *, batching: bool = False, workers: int = 60, capacity: int = CAPACITY, horizon_s: float = 0.0
    ) -> None:
        cluster = ClusterSettings(instant_moves=True, horizon_s=horizon_s)
        self.scheduler = Scheduler(lambda cluster: Mell(cluster, batching=batching), SchedulerSettings(cluster))
        self.now_s = 0.0
        self.capacity = capacity
        self.sizes: dict[str, int] = {}
        self.moves: list[e.MoveRequest] = []
        self.queued: list[str] = []
        self.keep_asleep(workers)

    @property
    def policy(self) -> Mell:
        """Return the policy under test."""
        policy = self.scheduler.policy
        assert isinstance(policy, Mell)
        return policy

    def tell(self, event: e.AnyEvent) -> list[e.AnyCommand]:
        """Hand over the event; note moves; check the scheduler's own law."""
        commands = self.scheduler.handle(event)
        self.moves += [command for command in commands if isinstance(command, e.MoveRequest)]
        self.queued += [command.request for command in commands if isinstance(command, e.QueueRequest)]
        check_cluster(self.scheduler.cluster)
        return commands

    def keep_asleep(self, count: int) -> None:
        """Keep at least that many workers asleep."""
        cluster = self.scheduler.cluster
        for number in range(len(cluster.workers), count + len(cluster.active)):
            self.tell(e.WorkerUp(self.now_s, f"w{number}", self.capacity))

    def arrive(self, *sizes: int) -> list[str]:
        """Add requests of these sizes, one after the other; return their names."""
        names = []
        for size in sizes:
            name = f"r{len(self.sizes)}"
            self.sizes[name] = size
            names.append(name)
            self.tell(e.RequestArrived(self.now_s, name, size))
        return names

    def grow(self, sizes: Mapping[str, int]) -> None:
        """Let the requests grow, all at once."""
        self.sizes.update(sizes)
        self.tell(e.RequestsGrew(self.now_s, dict(sizes)))

    def finish(self, *names: str) -> None:
        """End the requests, one after the other."""
        for name in names:
            self.tell(e.RequestFinished(self.now_s, name))

    def epoch(self) -> None:
        """End an epoch, which releases what was held back."""
        self.now_s += 1.0
        self.tell(e.EpochStarted(self.now_s))

    def bins(self) -> list[list[int]]:
        """Return the sizes on each worker in use, largest first."""
        workers = self.scheduler.cluster.active.values()
        return [sorted((r.kv_bytes for r in w.requests.values()), reverse=True) for w in workers if w.requests]

    def worker_of(self, name: str) -> str:
        """Return where the request runs."""
        worker = self.scheduler.cluster.requests[name].worker
        assert worker is not None
        return worker.id

    def check_theorem(self) -> None:
        """Check the corrected Theorem 1, from each bin's items alone (see `melld.scheduler.policies.mell.settle`)."""
        book = self.policy.plan.book
        light, hungry, unfilled, single_room, outside, has_t_bin = [], [], [], [], [], False
        for bin_ in book.bins.values():
            sizes = [(item.klass, item.projected_bytes) for item in bin_.items]
            if not sizes:
                continue
            klass = max(klass for klass, _ in sizes)
            free = self.capacity - sum(size for _, size in sizes)
            assert free >= 0, sizes
            weight = sum(WEIGHT_SIXTHS[k] for k, _ in sizes)
            filled = 4 * free < self.capacity
            has_t_bin = has_t_bin or klass is T
            if klass is T:
                unfilled += [] if filled else [sizes]
                continue
            if klass is L:
                large = max(size for _, size in sizes)
                if not any(k in (S, M) for k, _ in sizes):
                    single_room.append(self.capacity - large)
            else:
                outside += [size for k, size in sizes if k in (S, M)]
                if weight < FULL_SIXTHS:
                    light.append((klass, sizes))
                    continue
            if not filled:
                hungry.append(sizes)
        assert sum(klass is M for klass, _ in light) <= 1, ("(1)", light)
        assert sum(klass is S for klass, _ in light) <= 1, ("(2)", light)
        assert len(unfilled) <= 1, ("(3)", unfilled)
        assert not single_room or not outside or max(single_room) < min(outside), ("(4)", single_room, outside)
        assert not has_t_bin or not hungry, ("(5)", hungry)

    def check_groups(self) -> None:
        """Check that groups are worth one T each, hold only tiny requests, and at most one per bin is open."""
        for bin_ in self.policy.plan.book.bins.values():
            groups = [item for item in bin_.items if item.grouped]
            assert sum(LIMITS.class_of(group.projected_bytes) is TINY for group in groups) <= 1
            for item in bin_.items:
                assert item.projected_bytes == sum(item.sizes.values())
                assert item.grouped or len(item.sizes) == 1
                if item.grouped:
                    assert item.projected_bytes <= self.capacity // 4
                    assert all(size <= self.capacity // 8 for size in item.sizes.values())
