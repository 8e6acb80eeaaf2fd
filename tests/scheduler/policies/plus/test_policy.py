"""`mell-plus` moves late, little, and in time."""

from melld.ids import WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.driving import arrive, finish, moved, of_kind, placed, scheduler_with

RATE = 1  # bytes per second that each request grows


def grown(scheduler: Scheduler, now_s: float, seconds: int) -> list[e.AnyCommand]:
    """Let every running request grow for so many seconds, with an epoch in each; return all commands of that time."""
    commands: list[e.AnyCommand] = []
    for second in range(1, seconds + 1):
        sizes = {r.id: r.kv_bytes + RATE for r in scheduler.cluster.requests.values() if r.worker}
        commands += scheduler.handle(e.RequestsGrew(now_s + second, sizes))
        commands += scheduler.handle(e.EpochStarted(now_s + second))
    return commands


def instant(workers: int = 3, horizon_s: float = 2.0) -> Scheduler:
    """Complete moves as they are decided."""
    cluster = ClusterSettings(horizon_s=horizon_s, instant_moves=True)
    return scheduler_with(workers, "mell-plus", cluster=cluster)


def test_nothing_moves_while_nothing_overflows() -> None:
    """A departure may yet make a move unnecessary."""
    scheduler = instant()
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    assert not moved(grown(scheduler, 0.0, 30))


def test_one_request_leaves_just_before_its_worker_overflows() -> None:
    """The stream is never preempted, and only one request pays for it."""
    scheduler = instant()
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    commands = grown(scheduler, 0.0, 60)
    assert moved(commands) == {"b": "w1"}
    assert max(w.used_bytes for w in scheduler.cluster.workers.values()) <= 1000
    urgency_s = of_kind(commands, e.MoveRequest)[0].urgency_s
    assert 0.0 <= urgency_s <= 2.0


def test_in_flight_the_request_leaves_earlier_by_the_moves_time() -> None:
    """With a slow link the migration ends before the memory does."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    for number in range(5):
        scheduler.policy.outlook.moves.took(400 + number, 8.0)
    now_s = 0.0
    while not (commands := moved(grown(scheduler, now_s, 1))):
        now_s += 1.0
    assert commands == {"b": "w1"}
    left_s = (1000 - scheduler.cluster.workers["w0"].used_bytes) / (2 * RATE)
    assert 8.0 <= left_s <= 16.0


def test_an_arrival_avoids_a_worker_that_it_would_soon_overflow() -> None:
    """A request placed there would only have to move again."""
    scheduler = instant()
    for name, size in (("a", 500), ("b", 300), ("c", 600)):
        arrive(scheduler, name, size)
    grown(scheduler, 0.0, 3)
    assert placed(arrive(scheduler, "new", 180, 3.0)) == {"new": "w1"}


def test_a_worker_is_woken_only_if_no_departure_makes_room() -> None:
    """One request steps aside for the arrival where that is enough."""
    scheduler = instant(workers=3)
    for name, size in (("a", 500), ("b", 200), ("c", 700), ("d", 40)):
        arrive(scheduler, name, size)
    commands = arrive(scheduler, "new", 450)
    assert moved(commands) == {"b": "w1"}
    assert placed(commands) == {"new": "w0"}
    assert not of_kind(commands, e.ActivateWorker)


def test_a_worker_is_emptied_when_the_rest_can_hold_its_requests() -> None:
    """GPUs are given back as the load falls."""
    scheduler = instant()
    for name, size in (("a", 500), ("b", 400), ("c", 500), ("d", 300)):
        arrive(scheduler, name, size)
    finish(scheduler, "a")
    finish(scheduler, "d")
    commands = scheduler.handle(e.EpochStarted(1.0))
    assert len(moved(commands)) == 1
    assert len(of_kind(commands, e.RetireWorker)) == 1
    assert len(scheduler.cluster.active) == 1


def test_in_flight_nothing_is_packed_tighter_before_growth_is_known() -> None:
    """Without known growth the policy would fill the other workers completely."""
    scheduler = scheduler_with(3, "mell-plus")
    for name, size in (("a", 500), ("b", 400), ("c", 500), ("d", 300)):
        arrive(scheduler, name, size)
    finish(scheduler, "a")
    finish(scheduler, "d")
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))
    assert moved(grown(scheduler, 1.0, 3))


def test_in_flight_a_request_leaves_earlier_by_a_block_s_time() -> None:
    """Several requests may take their next block at once."""
    assert _free_when_one_leaves(block_bytes=40) >= _free_when_one_leaves(block_bytes=0) + 40


def _free_when_one_leaves(block_bytes: int) -> int:
    scheduler = Scheduler(ALL_POLICIES["mell-plus"], SchedulerSettings(cluster=ClusterSettings(horizon_s=2.0)))
    for number in range(3):
        scheduler.handle(e.WorkerUp(0.0, WorkerId(f"w{number}"), 1000, block_bytes=block_bytes))
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    now_s = 0.0
    while not moved(grown(scheduler, now_s, 1)):
        now_s += 1.0
    return 1000 - scheduler.cluster.workers[WorkerId("w0")].used_bytes


def test_a_drain_is_all_or_nothing() -> None:
    """Half of a drain is moves for nothing."""
    scheduler = instant()
    for name, size in (("a", 500), ("b", 490), ("c", 450), ("d", 450), ("e", 700)):
        arrive(scheduler, name, size)
    finish(scheduler, "b")
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))


def test_a_taker_with_incoming_moves_is_reached_later() -> None:
    """Moves to one worker share its link: the last of them may come after the source has overflowed."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    grown(scheduler, 0.0, 2)
    cluster, outlook = scheduler.cluster, scheduler.policy.outlook
    first, second, idle, taker = cluster.requests["c"], cluster.requests["a"], *map(cluster.workers.get, ("w1", "w2"))
    cluster.activate(taker, "test")
    outlook.moves.took(400, 20.0)
    assert outlook.arrives_in_time(second, taker)
    cluster.assign(first, taker, "test")
    assert not outlook.arrives_in_time(second, taker)
    assert outlook.arrives_in_time(second, idle)


def test_a_waking_taker_is_reached_once_it_is_awake() -> None:
    """Where the source overflows before that, a worker that is awake is better, though it is fuller."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    grown(scheduler, 0.0, 2)
    cluster, outlook = scheduler.cluster, scheduler.policy.outlook
    request, taker = cluster.requests["a"], cluster.workers["w2"]
    life_s = outlook.life_s(request.worker)
    scheduler.handle(e.WorkerWakeTimeChanged(cluster.now_s, taker.id, life_s + 5.0))
    cluster.activate(taker, "test")
    assert (outlook.wakes_s(taker), outlook.wakes_s(request.worker)) == (life_s + 5.0, 0.0)
    assert not outlook.arrives_in_time(request, taker)
    cluster.now_s += life_s
    assert outlook.arrives_in_time(request, taker)


def test_a_leaving_request_may_not_be_gone_in_time() -> None:
    """A second move goes where nothing is in its way: it is wanted because the first may be late."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    for name, size in (("a", 480), ("b", 420), ("c", 400)):
        arrive(scheduler, name, size)
    grown(scheduler, 0.0, 2)
    cluster, outlook = scheduler.cluster, scheduler.policy.outlook
    source, idle, taker = map(cluster.workers.__getitem__, map(WorkerId, ("w0", "w1", "w2")))
    cluster.activate(taker, "test")
    outlook.moves.took(400, 20.0)
    cluster.assign(cluster.requests["b"], taker, "test")
    assert outlook.life_s(source) > 100.0
    assert not outlook.arrives_in_time(cluster.requests["a"], taker)
    assert outlook.arrives_in_time(cluster.requests["a"], idle)


def test_if_a_move_comes_too_late_the_smallest_request_leaves_too() -> None:
    """A move slower than any before costs nobody a preemption: a small request is still in time."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    for name, size in (("a", 500), ("b", 300), ("small", 40)):
        arrive(scheduler, name, size)
    commands: list[e.AnyCommand] = []
    now_s = 0.0
    while not moved(commands):
        commands = grown(scheduler, now_s, 1)
        now_s += 1.0
    (slow,) = moved(commands)
    assert slow != "small"
    while not moved(commands := grown(scheduler, now_s, 1)):
        now_s += 1.0
    assert moved(commands) == {"small": "w1"}
    assert scheduler.cluster.workers["w0"].used_bytes <= 1000


def test_nothing_hurries_to_a_worker_that_is_still_waking() -> None:
    """It would come too late, and meanwhile both would have to keep room for it."""
    scheduler = scheduler_with(2, "mell-plus", cluster=ClusterSettings(horizon_s=2.0))
    scheduler.handle(e.WorkerWakeTimeChanged(0.0, WorkerId("w1"), 1000.0))
    for name, size in (("a", 500), ("b", 300), ("small", 40)):
        arrive(scheduler, name, size)
    left = [name for second in range(90) for name in moved(grown(scheduler, float(second), 1))]
    assert scheduler.cluster.workers["w0"].used_bytes > 1000
    assert len(left) == 1
    assert left != ["small"]


def uneven(*capacities: int) -> Scheduler:
    """Return workers w0, w1, ... of these capacities."""
    scheduler = Scheduler(ALL_POLICIES["mell-plus"], SchedulerSettings(cluster=ClusterSettings(horizon_s=2.0)))
    for number, capacity_bytes in enumerate(capacities):
        scheduler.handle(e.WorkerUp(0.0, WorkerId(f"w{number}"), capacity_bytes))
    return scheduler


def settled(scheduler: Scheduler, now_s: float, seconds: int) -> list[e.AnyCommand]:
    """As `grown`, with every move committing in the second in which it was decided."""
    commands: list[e.AnyCommand] = []
    for second in range(seconds):
        decided = grown(scheduler, now_s + second, 1)
        for request in moved(decided):
            decided += scheduler.handle(e.MoveCommitted(now_s + second + 1, request))
        commands += decided
    return commands


def test_a_worker_that_lost_capacity_is_emptied_until_the_rest_fits() -> None:
    """Somebody else's process takes most of a GPU: streams move to where there is room, and workers are woken."""
    scheduler = uneven(1000, 1000, 1000, 1000)
    for number in range(9):
        arrive(scheduler, f"r{number}", 100)
    workers = scheduler.cluster.workers
    for name in ("w1", "w2"):
        scheduler.cluster.activate(workers[WorkerId(name)], "test")
    settled(scheduler, 0.0, 2)
    scheduler.handle(e.WorkerCapacityChanged(2.0, WorkerId("w0"), 300))
    settled(scheduler, 2.0, 5)
    assert workers[WorkerId("w0")].used_bytes <= 300
    assert all(worker.used_bytes <= worker.capacity_bytes for worker in workers.values())


def test_a_lone_request_moves_to_a_larger_worker_when_it_outgrows_its_own() -> None:
    """Else the stream would end, or be preempted again and again, beside a GPU that could hold it."""
    scheduler = uneven(100, 1000)
    arrive(scheduler, "long", 90)
    assert moved(settled(scheduler, 0.0, 20)) == {"long": "w1"}


def test_a_lone_request_stays_where_no_worker_is_larger() -> None:
    """A move to a worker of the same size would be for nothing, again and again."""
    scheduler = uneven(100, 100, 100)
    arrive(scheduler, "long", 80)
    assert not moved(settled(scheduler, 0.0, 25))


def test_empty_awake_workers_are_no_room_for_a_drain() -> None:
    """They stay awake for `[idle] sleep_after_s`; counted as room, they would let others be overfilled."""
    scheduler = Scheduler(
        ALL_POLICIES["mell-plus"],
        SchedulerSettings(cluster=ClusterSettings(horizon_s=1.0, instant_moves=True, retire_after_s=60.0)),
    )
    for number in range(4):
        scheduler.handle(e.WorkerUp(0.0, WorkerId(f"w{number}"), 1000))
    for name, size in (("a", 950), ("b", 950), ("c", 700), ("d", 290), ("e", 260)):
        arrive(scheduler, name, size)
    for name in ("a", "b", "d"):
        finish(scheduler, name)
    assert len(scheduler.cluster.active) == 4
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))


def test_waiting_for_a_start_does_not_count_as_move_time() -> None:
    """Else every worker would look overloaded for minutes after one cold start, and wake another."""
    scheduler = uneven(1000, 1000)
    starting = WorkerId("w1")
    scheduler.handle(e.WorkerWakeTimeChanged(0.0, starting, 30.0))
    for name in ("a", "b"):
        arrive(scheduler, name, 300)
    scheduler.handle(e.MoveAsked(1.0, "a", starting))
    scheduler.handle(e.WorkerWakeTimeChanged(31.0, starting, 0.0))
    scheduler.handle(e.MoveCommitted(31.5, "a"))
    moves = scheduler.policy.outlook.moves
    assert moves.expected_s(300) == 0.0
    scheduler.handle(e.MoveAsked(32.0, "b", starting))
    scheduler.handle(e.MoveCommitted(32.5, "b"))
    assert moves.expected_s(300) == 0.5
