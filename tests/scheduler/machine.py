"""A hypothesis state machine that drives any policy with any legal events, and an auditor of its commands.

The auditor keeps books of its own, from events and commands alone, and shares no code with the scheduler's.
"""

from itertools import pairwise

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.priorities import Priorities, class_of
from melld.scheduler.roles import Role, RoleSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.targets import promised
from melld.simulator.experiment import ALL_POLICIES
from tests.effort import examples
from tests.scheduler.law import check_cluster

CAPACITY = 2400  # divisible by 2, 3, 4 and 8: the limits of the paper's classes
LIMITS = [CAPACITY // parts for parts in (1, 2, 3, 4, 8)]
SIZES = st.one_of(
    st.sampled_from([limit + off for limit in LIMITS for off in (-1, 0, 1)]),
    st.integers(1, CAPACITY // 8),
    st.integers(1, CAPACITY),
)
PREFIX_BYTES = CAPACITY // 4
NAMES = [f"w{number}" for number in range(6)]
PREFILLING, DECODING = (dict.fromkeys(NAMES[:count], role) for count, role in ((2, Role.PREFILL), (6, Role.DECODE)))
FIXED_ROLES = [{}, {}, PREFILLING, DECODING | PREFILLING, dict.fromkeys(NAMES, Role.PREFILL)]


def machine_number(worker: str) -> int:
    """Return the machine of a worker: there are two."""
    return int(worker[1:]) % 2


class Books:
    """An outside observer's model: the place of every request and the load of every worker, from messages alone."""

    def __init__(self, instant: bool) -> None:
        self.instant = instant
        self.kv_between_machines = False
        self.capacity: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.awake: set[str] = set()
        self.drained: set[str] = set()
        self.size: dict[str, int] = {}
        self.at: dict[str, str | None] = {}
        self.going: dict[str, str] = {}
        self.pinned: set[str] = set()  # an operator has sent them where they are or go
        self.rank: dict[str, tuple[bool, int, int]] = {}  # who waits: never had a worker, priority, place in the line
        self.waits_since: dict[str, float] = {}
        self.promised: set[str] = set()  # room was kept for them once: since then they may be passed
        self.promised_s: dict[str, list[float]] = {}
        self.now_s, self.age_s = 0.0, float("inf")
        self.prefix: dict[str, tuple[str, int]] = {}  # whose beginning it has, and how much of it
        self.shared: dict[str, int] = {}  # what a worker has told, less all that has left it since
        self.client: dict[str, str] = {}
        self.priority: dict[str, int] = {}
        self.suspended_s: dict[str, list[float]] = {}

    def usable(self) -> list[str]:
        """Return the workers that may be given requests, including sleeping ones."""
        return [name for name in self.capacity if name not in self.drained and self.slots[name] > 0]

    def could_hold(self, size: int) -> bool:
        """Return True if any of these workers could hold that much when empty."""
        return any(size <= self.capacity[name] for name in self.usable())

    def has_room(self, size: int, but: str | None = None) -> bool:
        """Return True if any of these workers can hold that much now, woken if needed."""
        return any(
            name != but and (self.fits(name, size) if name in self.awake else size <= self.capacity[name])
            for name in self.usable()
        )

    def used(self, worker: str) -> int:
        """Return the bytes of all requests there or on their way there, as far as sharing is known."""
        return sum(self.size[r] for r in self.on(worker)) - self.shared.get(worker, 0)

    def saved(self, worker: str) -> int:
        """Return the bytes really shared there: of each common prefix, all but its longest copy."""
        parts: dict[str, list[int]] = {}
        for name, size in (self.prefix[r] for r in self.on(worker)):
            parts.setdefault(name, []).append(size)
        return sum(sum(sizes) - max(sizes) for sizes in parts.values())

    def holds(self, worker: str) -> bool:
        """Return True if the reported sharing is at most the real one."""
        return self.shared.get(worker, 0) <= self.saved(worker)

    def leave(self, request: str, worker: str | None) -> None:
        """Let a request leave the worker: it frees nothing that others may share."""
        if worker in self.shared:
            self.shared[worker] = max(self.shared[worker] - self.size[request], 0)

    def on(self, worker: str) -> list[str]:
        """Return the requests that count on the worker, once for each role."""
        return [r for r, w in self.at.items() if w == worker] + [r for r, w in self.going.items() if w == worker]

    def fits(self, worker: str, size: int) -> bool:
        """Return True if there is room and a slot, on a worker that is awake and takes requests."""
        return (
            worker in self.awake
            and worker not in self.drained
            and len(self.on(worker)) < self.slots[worker]
            and self.used(worker) + size <= self.capacity[worker]
        )

    def apply(self, command: e.AnyCommand) -> None:
        """Apply one command; fail if it could not be carried out just now."""
        match command:
            case e.ActivateWorker(worker=worker):
                assert worker in self.capacity, command
                assert worker not in self.awake | self.drained, command
                assert command.reason != "role", command
                self.awake.add(worker)
            case e.RetireWorker(worker=worker):
                assert worker in self.awake, command
                assert not self.on(worker), command
                self.awake.remove(worker)
            case e.PlaceRequest(request=request, worker=worker):
                assert self.at[request] is None, command
                assert self.fits(worker, self.size[request]), command
                rank = self.rank.pop(request)
                assert not any(self.goes_before(r, request, rank) for r in self.rank), command
                assert not rank[0] or not any(self.starves(r, request) for r in self.rank), command
                self.at[request] = worker
            case e.MoveRequest(request=request, source=source, destination=destination):
                assert self.at[request] == source != destination, command
                assert request not in self.going, command
                assert not command.after_first_token or command.reason == "role", command
                if command.reason == "role" and not self.kv_between_machines:
                    assert machine_number(source) == machine_number(destination), command
                assert request not in self.pinned or source in self.drained or command.reason == "operator", command
                self.pinned.discard(request)
                if command.reason == "operator":
                    self.pinned.add(request)
                assert self.fits(destination, self.size[request]), command
                assert command.kv_bytes == self.size[request], command
                if self.instant:
                    self.leave(request, source)
                    self.at[request] = destination
                else:
                    self.going[request] = destination
            case e.PromiseRoom(request=request, worker=worker, kv_bytes=kv_bytes):
                assert self.at[request] is None, command
                assert worker in self.awake - self.drained, command
                assert kv_bytes == self.size[request] <= self.capacity[worker], command
                assert not (self.promised - {request}) & self.rank.keys(), "a second promise"
                self.promised = {request}
                self.promised_s.setdefault(request, []).append(self.now_s)
                assert len(self.promised_s[request]) <= 2, command
            case e.SuspendRequest(request=request, worker=worker):
                assert self.at[request] == worker, command
                assert request not in self.going.keys() | self.pinned, command
                assert self.priority[request] > 0, command
                before = self.suspended_s.setdefault(request, [])
                assert len(before) < 2, command
                assert all(self.now_s - then_s >= 10.0 for then_s in before), command
                assert any(self.priority[one] < 0 for one in self.rank), command
                before.append(self.now_s)
                self.displace(request)
            case e.QueueRequest(request=request):
                assert self.at[request] is None, command
            case e.RefuseRequest(request=request):
                assert self.size[request] > max(self.capacity.values()), command
                self.forget(request)
            case e.ShedRequest(request=request):
                assert self.rank[request][0], command  # it has never had a worker
                self.forget(request)

    def goes_before(self, other: str, request: str, rank: tuple[bool, int, int]) -> bool:
        """Return True if the other waiting request should have been served first; ties between two clients are free.

        Of two priorities only where it is sure, since one that fits nowhere may still lift those of its priority.
        """
        theirs = self.rank[other]
        if not self.could_hold(self.size[other]) or other in self.promised or request in self.promised:
            return False
        if theirs[1] == rank[1]:
            fair = rank[0] and theirs[0] and self.client[other] != self.client[request]
            return theirs < rank and not fair
        here = {name: one for name, one in (self.rank | {request: rank}).items() if one[1] == rank[1]}
        level, own = min(map(self.level, here)), self.level(other)
        some_begun = not all(one[0] for one in here.values())
        return own < level or (own == level and not some_begun and (not theirs[0] or theirs[1] < rank[1]))

    def starves(self, other: str, newcomer: str) -> bool:
        """Return True if the newcomer goes before the other waiting request beyond the stated bound.

        `docs/scheduling.md`, "Nobody starves": of another priority only while somebody of that waits who came at most
        `age_s` for each class between, and one more, after the other.
        """
        promised_s = self.promised_s.get(other, [-9.0])[-1]
        if not self.could_hold(self.size[other]) or self.now_s <= promised_s + 5.0:
            return False
        priority, theirs = self.priority[newcomer], self.priority[other]
        if priority == theirs:
            return self.client[newcomer] == self.client[other] and int(newcomer[1:]) > int(other[1:])
        those = [newcomer, *(name for name in self.rank if self.priority[name] == priority)]
        between = class_of(theirs) - class_of(priority) + 1
        return min(map(self.waits_since.__getitem__, those)) > self.waits_since[other] + between * self.age_s

    def level(self, name: str) -> int:
        """Return the class of the waiting request, less its age."""
        waited_s = self.now_s - self.waits_since[name]
        priority = self.priority[name]
        return (priority > 0) - (priority < 0) - int(waited_s // self.age_s)

    def heads(self) -> list[str]:
        """Return the requests that may be next: of the most urgent priority, the first of each client.

        Those that fit nowhere are passed over, and lift their priority until then.
        """
        left, found = dict(self.rank), list[str]()
        while left and not found:
            groups: dict[int, list[tuple[bool, int, int]]] = {}
            levels: dict[int, int] = {}
            for name, rank in left.items():
                groups.setdefault(rank[1], []).append(rank)
                levels[rank[1]] = min(levels.get(rank[1], 9), self.level(name))
            priority = min(groups, key=lambda one: (levels[one], all(rank[0] for rank in groups[one]), one))
            first: dict[str, str] = {}
            for rank, name in sorted((rank, name) for name, rank in left.items() if rank[1] == priority):
                if rank[0] == min(groups[priority])[0]:
                    first.setdefault(self.client[name] if rank[0] else "", name)
            found = [name for name in first.values() if self.could_hold(self.size[name])]
            if len(found) < len(first):  # who of them is passed over, and when, depends on fair shares
                found = [name for name in left if self.could_hold(self.size[name])]
            for name in first.values():
                del left[name]
        return found

    def free_the_drained(self) -> None:
        """Unpin the requests of draining workers: they may leave."""
        self.pinned = {request for request in self.pinned if self.at[request] not in self.drained}

    def displace(self, request: str) -> None:
        """Take the request's worker away; it waits ahead of newcomers."""
        self.leave(request, self.at[request])
        self.at[request] = None
        self.rank[request] = (False, self.priority[request], int(request[1:]))
        self.waits_since[request] = self.now_s

    def lose(self, name: str) -> None:
        """Lose the worker: requests there wait, and those on their way there stay."""
        for book in (self.capacity, self.slots):
            del book[name]
        self.awake.discard(name)
        self.drained.discard(name)
        self.shared.pop(name, None)
        for request, worker in list(self.at.items()):
            if name in (worker, self.going.get(request)):
                if (destination := self.going.pop(request, None)) != name:
                    self.leave(request, destination)
                self.pinned.discard(request)
                if worker == name:
                    self.displace(request)

    def forget(self, request: str) -> None:
        """Forget the request."""
        for worker in (self.at[request], self.going.get(request)):
            self.leave(request, worker)
        for book in (self.size, self.at, self.going, self.rank, self.prefix):
            book.pop(request, None)
        self.pinned.discard(request)


class PolicyMachine(RuleBasedStateMachine):
    """All legal events in any order.  Subclasses name the policy and whether moves are instant."""

    policy: str
    instant: bool

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.count = 0
        self.history: list[e.AnyEvent] = []
        self.answers: list[list[e.AnyCommand]] = []

    def build(self) -> Scheduler:
        """Build a fresh scheduler with the settings of this run."""
        return Scheduler(ALL_POLICIES[self.policy], self.settings)

    @initialize(
        workers=st.integers(1, 5),
        slots=st.sampled_from([1, 3, 1000]),
        cluster=st.builds(
            ClusterSettings,
            horizon_s=st.sampled_from([0.0, 2.0]),
            targets=st.sampled_from([None, promised(None, 2.0, False, 0.99)]),
            retire_after_s=st.sampled_from([None, 0.0, 3.0]),
            kv_between_machines=st.booleans(),
            roles=st.builds(RoleSettings, auto=st.booleans(), fixed=st.sampled_from(FIXED_ROLES)),
            priorities=st.builds(
                Priorities,
                headroom=st.sampled_from([0.0, 0.25]),
                age_s=st.sampled_from([60.0, 4.0]),
                hole_s=st.sampled_from([0.0, 2.0]),
                suspend=st.booleans(),
            ),
        ),
        limits=st.sampled_from([(None, None), (None, None), (3, None), (None, 2.0)]),
    )
    def start(
        self,
        workers: int,
        slots: int,
        cluster: ClusterSettings,
        limits: tuple[int | None, float | None],
    ) -> None:
        cluster = msgspec.structs.replace(cluster, instant_moves=self.instant)
        self.settings = SchedulerSettings(cluster, *limits)
        self.scheduler = self.build()
        self.books = Books(self.instant)
        self.books.age_s = cluster.priorities.age_s
        self.books.kv_between_machines = cluster.kv_between_machines
        for name in NAMES[:workers]:
            self.bring_up(name, CAPACITY, slots)

    def tell(self, event: e.AnyEvent) -> list[e.AnyCommand]:
        """Hand the event to the scheduler and its answer to the books."""
        event = msgspec.structs.replace(event, id=len(self.history) + 1)
        self.history.append(event)
        self.books.now_s = event.at_s
        commands = self.scheduler.handle(event)
        self.answers.append(commands)
        for command in commands:
            assert command.cause == event.id, command
            self.books.apply(command)
        self.nobody_is_woken_in_vain(commands)
        for suspended, then in pairwise(commands):
            if isinstance(suspended, e.SuspendRequest):
                assert isinstance(then, e.PlaceRequest), commands
                assert self.books.priority[then.request] < 0, commands
                assert then.worker == suspended.worker, commands
        if self.instant:
            for command in commands:
                if isinstance(command, e.MoveRequest):
                    self.tell(e.MoveCommitted(self.now_s, command.request, command.destination))
        return commands

    def nobody_is_woken_in_vain(self, commands: list[e.AnyCommand]) -> None:
        """Assert that a woken worker gets a request that is not handed over, or is in service without roles."""
        policy = self.scheduler.policy
        if not isinstance(policy, MellSlo):
            return
        taken = {one.worker for one in commands if isinstance(one, e.PlaceRequest)}
        taken |= {one.destination for one in commands if isinstance(one, e.MoveRequest) and one.reason != "role"}
        in_use = len(self.books.awake - self.books.drained)
        for one in commands:
            if isinstance(one, e.ActivateWorker) and one.reason != "operator":
                assert one.worker in taken or in_use <= policy.demand.workers, commands

    def bring_up(self, name: str, capacity: int, slots: int, *, steady: bool = True) -> None:
        self.books.capacity[name], self.books.slots[name] = capacity, slots
        self.tell(e.WorkerUp(self.now_s, name, capacity, slots, machine=machine_number(name), steady=steady))

    # ---- requests

    @rule(
        sizes=st.lists(SIZES, min_size=1, max_size=8),
        priority=st.sampled_from([0, 0, 0, 1, 4, -1]),
        client=st.sampled_from(["", "", "key0", "key1"]),
        prefix=st.sampled_from(["", "a", "b"]),
    )
    def arrive(self, sizes: list[int], priority: int, client: str, prefix: str) -> None:
        for size in sizes:
            self.count += 1
            name = f"r{self.count}"
            self.books.size[name], self.books.at[name], self.books.rank[name] = size, None, (True, priority, self.count)
            self.books.priority[name], self.books.client[name] = priority, client
            self.books.waits_since[name] = self.now_s
            self.books.prefix[name] = (prefix, min(size, PREFIX_BYTES)) if prefix else (name, 0)
            event = e.RequestArrived(self.now_s, name, size, prompt_tokens=size, priority=priority, client=client)
            self.tell(event)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.books.size)), max_size=3)) if self.books.size else []
        for name in sorted(set(names)):
            self.books.forget(name)
            self.tell(e.RequestFinished(self.now_s, name))
            self.tell(e.RequestFinished(self.now_s, name))

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Grow some requests, to a class limit or by a little, never beyond the capacity by themselves."""
        sizes = {}
        for name in sorted(self.books.size):
            if self.books.at[name] is not None and data.draw(st.booleans()):
                old = self.books.size[name]
                steps = [old + step for step in (1, 20)] + [limit for limit in LIMITS if old < limit <= 2 * old]
                sizes[name] = data.draw(st.sampled_from([size for size in steps if size <= CAPACITY] or [old]))
        self.books.size.update(sizes)
        self.tell(e.RequestsGrew(self.now_s, sizes))

    @rule(data=st.data(), committed=st.booleans())
    @precondition(lambda self: self.books.going)
    def end_move(self, data: st.DataObject, committed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.books.going)))
        destination = self.books.going.pop(name)
        self.books.leave(name, self.books.at[name] if committed else destination)
        if committed:
            self.books.at[name] = destination
            self.tell(e.MoveCommitted(self.now_s, name, destination))
        else:
            self.books.pinned.discard(name)
            self.tell(e.MoveAborted(self.now_s, name, "test", destination))
        self.tell(e.MoveAborted(self.now_s, name, "late", "a worker of another time"))

    @rule(data=st.data(), worker=st.sampled_from(NAMES))
    def ask(self, data: st.DataObject, worker: str) -> None:
        """Have an operator request a placement, perhaps alone: the request stays there from then on."""
        if not self.books.size or worker not in self.books.capacity:
            return
        name = data.draw(st.sampled_from(sorted(self.books.size)))
        if self.books.at[name] == worker and name not in self.books.going:
            self.books.pinned.add(name)
        self.tell(e.MoveAsked(self.now_s, name, worker))

    # ---- workers

    @rule(name=st.sampled_from(NAMES), slots=st.sampled_from([2, 1000]), steady=st.booleans())
    def up(self, name: str, slots: int, steady: bool) -> None:
        if name not in self.books.capacity:
            self.bring_up(name, CAPACITY, slots, steady=steady)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def down(self, names: list[str]) -> None:
        """Lose a worker, or several at the same moment."""
        for name in set(names) & self.books.capacity.keys():
            self.books.lose(name)
        self.tell(e.WorkerDown(self.now_s, names[0], tuple(names[1:])))

    @rule(name=st.sampled_from(NAMES), back=st.booleans())
    def drain(self, name: str, back: bool) -> None:
        if name in self.books.capacity:
            (self.books.drained.discard if back else self.books.drained.add)(name)
            event = e.WorkerResumed if back else e.WorkerDraining
            self.books.free_the_drained()
            self.tell(event(self.now_s, name))

    @rule(name=st.sampled_from(NAMES), capacity=st.sampled_from([CAPACITY // 2, CAPACITY, 2 * CAPACITY]))
    def resize(self, name: str, capacity: int) -> None:
        if name in self.books.capacity:
            self.books.capacity[name] = capacity
            self.tell(e.WorkerCapacityChanged(self.now_s, name, capacity))

    @rule(name=st.sampled_from(NAMES), part=st.sampled_from([1.0, 1.0, 0.5, 0.0]))
    def share(self, name: str, part: float) -> None:
        """Report what a worker's requests share, or a lower bound of it."""
        if name in self.books.capacity:
            self.books.shared[name] = int(part * self.books.saved(name))
            self.tell(e.WorkerSharingChanged(self.now_s, name, self.books.shared[name]))

    @rule(name=st.sampled_from(NAMES), slots=st.sampled_from([1, 4, 1000]))
    def change_slots(self, name: str, slots: int) -> None:
        if name in self.books.capacity:
            self.books.slots[name] = slots
            self.tell(e.WorkerSlotsChanged(self.now_s, name, slots))

    @rule(name=st.sampled_from(NAMES))
    def steady(self, name: str) -> None:
        if name in self.books.capacity:
            self.tell(e.WorkerSteadied(self.now_s, name))

    @rule(name=st.sampled_from(NAMES), wake_s=st.sampled_from([0.0, 2.5, 30.0]))
    def change_wake_time(self, name: str, wake_s: float) -> None:
        """End or restart a process: this changes the order of waking, and nothing else."""
        if name in self.books.capacity:
            self.tell(e.WorkerWakeTimeChanged(self.now_s, name, wake_s))

    @rule(name=st.sampled_from(NAMES), step_s=st.sampled_from([0.01, 0.06, 1.0]), prefill_s=st.sampled_from([0.0, 3.0]))
    def pace(self, name: str, step_s: float, prefill_s: float) -> None:
        """Make steps slower or faster: this changes where requests go, and nothing else."""
        if name in self.books.capacity:
            pace = e.WorkerPace(step_s, 2.0, 40.0, int(prefill_s > 0.0), 20, prefill_s)
            self.tell(e.WorkersPaced(self.now_s, {name: pace}))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]), growth=st.integers(0, 30))
    def epoch(self, seconds: float, growth: int) -> None:
        """Advance the time: all running requests grow alike, and the scheduler plans again."""
        self.now_s += seconds
        sizes = {
            name: max(size, min(size + growth, CAPACITY))
            for name, size in self.books.size.items()
            if self.books.at[name]
        }
        self.books.size.update(sizes)
        self.tell(e.RequestsGrew(self.now_s, sizes))
        self.books.free_the_drained()
        self.tell(e.EpochStarted(self.now_s))
        self.the_drained_are_emptied()

    # ---- what must hold whenever nothing is being handled

    @invariant()
    def the_books_agree(self) -> None:
        if not self.history:
            return
        cluster = self.scheduler.cluster
        check_cluster(cluster)
        assert all(self.books.holds(name) for name in self.books.capacity), "what one frees is given out twice"
        shared = {name: worker.shared_bytes for name, worker in cluster.workers.items()}
        assert {name: self.books.shared.get(name, 0) for name in cluster.workers} == shared
        assert self.books.size == {r.id: r.kv_bytes for r in cluster.requests.values()}
        assert self.books.at == {r.id: r.worker and r.worker.id for r in cluster.requests.values()}
        assert self.books.going == {r.id: r.destination.id for r in cluster.requests.values() if r.destination}

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        """Assert that the queue's first placeable request has no room; a horizon may hold room back, sleep may not."""
        if self.books.promised & self.books.rank.keys():
            return  # room is kept for one of them, and others pass it
        sizes = [self.books.size[name] for name in self.books.heads()]
        asleep = [self.books.capacity[name] for name in self.books.usable() if name not in self.books.awake]
        assert not sizes or any(size > max(asleep, default=-1) for size in sizes), self.books.heads()
        if sizes and self.settings.cluster.horizon_s == 0.0:
            assert any(not self.books.has_room(size) for size in sizes), self.books.heads()
        limit = self.scheduler.settings.max_waiting
        assert limit is None or sum(rank[0] for rank in self.books.rank.values()) <= limit

    def the_drained_are_emptied(self) -> None:
        """Assert that requests left on a draining worker have nowhere to go, unless waiting ones go first."""
        if self.books.rank or self.settings.cluster.horizon_s:
            return
        for request, worker in self.books.at.items():
            if worker in self.books.drained and request not in self.books.going:
                assert not self.books.has_room(self.books.size[request], but=worker), request

    def teardown(self) -> None:
        """Check that the same events give the same commands."""
        if self.history:
            again = self.build()
            assert self.answers == [again.handle(event) for event in self.history]


def machine_of(name: str, instant_moves: bool, many: int) -> type:
    """Return the test case of one policy."""
    title = "".join(part.capitalize() for part in name.split("-")) + ("Instant" if instant_moves else "InFlight")
    machine = type(title, (PolicyMachine,), {"policy": name, "instant": instant_moves})
    case = machine.TestCase
    case.settings = hypothesis_settings(max_examples=examples(many), stateful_step_count=40, deadline=None)
    return case
