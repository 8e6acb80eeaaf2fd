"""The simulation: time, memory, growth, preemption and migration follow from the settings, by hand calculation."""

import random

import msgspec
import pytest

from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.scheduler.events import AnyCommand, AnyEvent
from melld.simulator.experiment import ALL_POLICIES, SchedulerChoices, run_policy
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Measures, Report
from melld.simulator.run import SimulationStuck
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import Workload
from tests.scheduler.law import check_cluster
from tests.simulator.setups import BLOCK_BYTES, BLOCKS, FEW_GPUS, MACHINES, SMALL, one_by_one, scheduler, small_load


class Script:
    """A scheduler that plays back decisions: the given commands on the first due event of a kind."""

    def __init__(self, *lines: tuple[type[AnyEvent], float, list[AnyCommand]]) -> None:
        self.lines = list(lines)
        self.heard: list[AnyEvent] = []

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        """Return the next line's commands if this is its cue."""
        self.heard.append(event)
        if self.lines and type(event) is self.lines[0][0] and event.at_s >= self.lines[0][1]:
            return self.lines.pop(0)[2]
        return []

    def heard_of(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        """Return the events of one kind."""
        return [event for event in self.heard if type(event) is kind]


def simulate(policy: str, settings: SimulatorSettings, load: Workload) -> Report:
    return run_policy(policy, settings, load, SchedulerChoices()).report


def play(settings: SimulatorSettings, load: Workload, script: Script) -> Measures:
    return Simulation(settings, load, script).run()  # type: ignore[arg-type]


def activate(worker: str) -> AnyCommand:
    return events.ActivateWorker("script", worker)  # type: ignore[arg-type]


def place(request: str, worker: str) -> AnyCommand:
    return events.PlaceRequest("script", request, worker)  # type: ignore[arg-type]


def retire(worker: str) -> AnyCommand:
    return events.RetireWorker("script", worker)  # type: ignore[arg-type]


def move(request: str, source: str, destination: str, kv_bytes: int) -> AnyCommand:
    return events.MoveRequest("script", request, source, destination, kv_bytes)  # type: ignore[arg-type]


def test_a_lone_request_takes_its_prefill_and_its_steps() -> None:
    """Times in the report are the model's times, not those of epochs."""
    report = simulate("best-fit", SMALL, one_by_one((1.0, 100, 51)))
    assert report.ttft_s.mean == pytest.approx(0.01)
    assert report.itl_s.mean == pytest.approx(0.02)
    assert (report.peak_gpus, report.requests, report.preemptions, report.migrations) == (1, 1, 0, 0)
    assert report.gpu_seconds == pytest.approx(1.01)  # from the arrival at 1.0 to the last token


def test_a_suspended_request_recomputes_its_tokens_and_goes_on() -> None:
    """It emits nothing while it waits, and loses none of what it has emitted."""
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), place("r0", "w0")]),
        (events.EpochStarted, 1.0, [events.SuspendRequest("script", "r0", "w0")]),  # type: ignore[arg-type]
        (events.EpochStarted, 2.0, [place("r0", "w0")]),
        (events.EpochStarted, 4.0, [retire("w0")]),
    )
    play(SMALL, one_by_one((0.0, 100, 101)), script)
    [ended] = script.heard_of(events.RequestFinished)
    emitted = 1 + (1.0 - 0.01) / 0.02
    assert ended.at_s == pytest.approx(2.0 + 150 * 0.0001 + (101 - emitted) * 0.02)


def test_growth_is_reported_in_blocks_at_each_epoch() -> None:
    """The scheduler sees what block tables say: whole blocks, only when they change."""
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), place("r0", "w0")]),
        (events.EpochStarted, 3.5, [retire("w0")]),
    )
    play(SMALL, one_by_one((0.5, 100, 101)), script)
    told = [event.kv_bytes["r0"] // BLOCK_BYTES for event in script.heard_of(events.RequestsGrew)]  # type: ignore[union-attr]
    tokens = [101 + int((epoch - 0.51) / 0.02) for epoch in (1.0, 1.5, 2.0, 2.5)]
    assert told == [-(-count // 16) for count in tokens]


def test_a_sleeping_gpu_computes_after_its_wake_time() -> None:
    """Waking costs the first client seconds; the report must show it."""
    slow = msgspec.structs.replace(SMALL, wake_s=4.0)
    assert simulate("best-fit", slow, one_by_one((1.0, 100, 51))).ttft_s.mean == pytest.approx(4.01)


def test_prompts_take_turns() -> None:
    """Three prompts at once on one GPU are prefilled one after the other."""
    load = one_by_one(*[(1.0, 1000, 2)] * 1, *[(1.0, 200, 2)] * 2)
    report = simulate("best-fit", SMALL, load)
    assert report.ttft_s.mean == pytest.approx((0.1 + 0.12 + 0.14) / 3)


def test_a_full_gpu_preempts_the_youngest_and_resumes_it() -> None:
    """Without migration vLLM preempts: the cost that best fit hides must be counted."""
    load = one_by_one((0.0, 400, 700), (0.1, 400, 700))
    one_gpu = msgspec.structs.replace(SMALL, gpus=1)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), place("r0", "w0")]),
        (events.RequestArrived, 0.1, [place("r1", "w0")]),
        (events.EpochStarted, 60.0, [retire("w0")]),
    )
    measures = play(one_gpu, load, script)
    assert [event.request for event in script.heard_of(events.RequestPreempted)] == ["r1"]  # type: ignore[union-attr]
    ended = {event.request: event.at_s for event in script.heard_of(events.RequestFinished)}  # type: ignore[union-attr]
    assert ended["r0"] == pytest.approx(0.04 + 699 * 0.02, abs=0.05)
    assert ended["r1"] > ended["r0"] + 5
    assert measures.counts.preemptions == 1


def test_a_slow_move_holds_memory_on_both_sides_and_then_commits() -> None:
    """The scheduler hears of a move's end when the link has carried it, and not before."""
    linked = msgspec.structs.replace(SMALL, link=LinkSettings(bytes_per_s=BLOCK_BYTES * 4, ways=(Via.KV,)), gpus=2)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), activate("w1"), place("r0", "w0")]),
        (events.EpochStarted, 0.0, [move("r0", "w0", "w1", 10 * BLOCK_BYTES)]),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1")]),
    )
    measures = play(linked, one_by_one((0.2, 160, 200)), script)
    (committed,) = script.heard_of(events.MoveCommitted)
    assert committed.at_s == pytest.approx(0.5 + 11 / 4, abs=0.5)  # ten blocks, and one or two of growth
    assert (measures.counts.migrations, measures.counts.migrations_kv) == (1, 1)
    assert measures.counts.bytes_moved >= 11 * BLOCK_BYTES


def test_tokens_are_sent_where_prefill_is_faster_than_the_link() -> None:
    """Over a slow link it is cheaper to recompute the keys and values."""
    linked = msgspec.structs.replace(SMALL, link=LinkSettings(bytes_per_s=BLOCK_BYTES / 10), gpus=2)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), activate("w1"), place("r0", "w0")]),
        (events.EpochStarted, 0.0, [move("r0", "w0", "w1", 10 * BLOCK_BYTES)]),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1")]),
    )
    measures = play(linked, one_by_one((0.2, 160, 200)), script)
    assert (measures.counts.migrations, measures.counts.migrations_kv, measures.counts.bytes_moved) == (1, 0, 0)


def test_a_failed_move_leaves_the_request_where_it_was() -> None:
    """A fault on the way must cost time, not tokens."""
    faulty = msgspec.structs.replace(MACHINES["slow, faulty moves"], failure_rate=0.999, gpus=2, wake_s=0.0)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), activate("w1"), place("r0", "w0")]),
        (events.EpochStarted, 0.0, [move("r0", "w0", "w1", 10 * BLOCK_BYTES)]),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1")]),
    )
    measures = play(faulty, one_by_one((0.2, 160, 200)), script)
    (aborted,) = script.heard_of(events.MoveAborted)
    assert aborted.reason == "injected fault"  # type: ignore[union-attr]
    assert (measures.counts.migrations, measures.counts.migrations_aborted) == (0, 1)
    (finished,) = script.heard_of(events.RequestFinished)
    assert finished.at_s == pytest.approx(0.216 + 199 * 0.02)


def test_a_move_that_outgrows_its_destination_is_cancelled() -> None:
    """Requests grow on their way: a worker with nothing to preempt must refuse the latest, not overflow."""
    slow = LinkSettings(bytes_per_s=BLOCK_BYTES, ways=(Via.KV,))
    linked = msgspec.structs.replace(SMALL, link=slow, gpus=3)
    awake = [activate(worker) for worker in ("w0", "w1", "w2")]
    moves = [move(request, source, "w2", 45 * BLOCK_BYTES) for request, source in (("r0", "w0"), ("r1", "w1"))]
    script = Script(
        (events.RequestArrived, 0.0, [*awake, place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w1")]),
        (events.EpochStarted, 0.5, moves),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1"), retire("w2")]),
    )
    measures = play(linked, one_by_one((0.1, 720, 500), (0.1, 720, 500)), script)
    (aborted,) = script.heard_of(events.MoveAborted)
    assert (aborted.request, aborted.reason) == ("r1", "no room")  # type: ignore[union-attr]
    assert aborted.at_s == 2.0  # each needs more than 50 blocks once it has 80 tokens: 0.172 + 80 * 0.02 = 1.77 s
    counts = measures.counts
    assert (counts.migrations, counts.migrations_aborted, counts.preemptions) == (0, 1, 0)  # r0 ended on its way


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_request_ends_and_the_scheduler_is_left_empty(policy: str, machines: str) -> None:
    """Nothing may leak: no request, no byte, no awake GPU, at any seed and with failing moves."""
    settings, load = MACHINES[machines], small_load(seed=3)
    brain = scheduler(policy, settings)
    simulation = Simulation(settings, load, brain)
    measures = simulation.run()
    check_cluster(brain.cluster)
    assert not simulation.fleet.runs
    assert not brain.cluster.requests
    assert not brain.cluster.active
    assert all(worker.used_bytes == 0 for worker in brain.cluster.workers.values())
    report = measures.report(policy)
    assert report.requests == len(load)
    assert report.ratio >= 1.0 or report.mean_gpus == 0


def check_fleet(fleet: SimulatedFleet) -> None:
    """Check that no worker holds more than its capacity."""
    fleet.memory.settle_sizes()
    assert (fleet.memory.used_bytes() <= fleet.settings.capacity_bytes).all()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_no_gpu_ever_holds_more_than_it_has(policy: str) -> None:
    """The physical law, checked in the middle of every epoch rather than in the log."""
    settings = MACHINES["slow, faulty moves"]
    brain = scheduler(policy, settings)
    simulation = Simulation(settings, small_load(seed=5, rate_per_s=4.0, seconds=25.0), brain)
    inner = brain.handle

    def checking(event: AnyEvent) -> list[AnyCommand]:
        check_cluster(brain.cluster)
        if type(event) is events.RequestFinished:
            check_fleet(simulation.fleet)
        return inner(event)

    simulation._decide = checking
    simulation.run()
    assert simulation.measures.counts.peak_gpus > 3


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_same_seed_gives_the_same_report(policy: str) -> None:
    """Figures in the documentation can be reproduced to the last digit."""
    settings = MACHINES["slow, faulty moves"]
    first, second = (msgspec.json.encode(simulate(policy, settings, small_load())) for _ in range(2))
    assert first == second


def test_a_bounded_cluster_queues_and_serves_everybody() -> None:
    """With too few GPUs requests wait; none is lost and the delay is reported."""
    few = msgspec.structs.replace(SMALL, gpus=2)
    report = simulate("best-fit", few, small_load(rate_per_s=6.0))
    assert report.peak_gpus == 2
    assert report.queued > 0
    assert report.queueing_s.p99 > report.queueing_s.p50
    assert report.ttft_s.mean > report.queueing_s.mean


def test_what_can_never_fit_is_refused_and_the_rest_served() -> None:
    """One absurd prompt must not stop the simulation."""
    report = simulate("best-fit", SMALL, one_by_one((0.0, 16 * BLOCKS + 1, 10), (1.0, 10, 10)))
    assert (report.requests, report.refused, report.peak_gpus) == (2, 1, 1)


def test_a_policy_that_never_places_raises_an_error() -> None:
    """A simulation that cannot end must not run indefinitely."""
    script = Script((events.RequestArrived, 0.0, [events.QueueRequest("script", "r0")]))  # type: ignore[arg-type]
    slow_epochs = msgspec.structs.replace(SMALL, epoch_s=3600.0)
    with pytest.raises(SimulationStuck, match="1 requests wait"):
        play(slow_epochs, one_by_one((0.0, 10, 10)), script)


def test_an_answer_stops_when_the_gpu_is_full() -> None:
    """As with vLLM's max_model_len, a request never outgrows a worker of its own."""
    report = simulate("best-fit", SMALL, one_by_one((0.0, 100, 10**6)))
    assert report.preemptions == 0
    assert report.end_s == pytest.approx(0.01 + (16 * BLOCKS - 100 - 1) * 0.02, abs=1.0)


def test_urgent_requests_go_first_if_the_scheduler_knows_them() -> None:
    """Both runs measure them apart; only where the scheduler knows do they wait less than the others."""
    load = small_load(rate_per_s=4.0).with_high(0.2, random.Random(3))
    reports = {}
    for tells in (True, False):
        settings = msgspec.structs.replace(FEW_GPUS, gpus=2, tells_priorities=tells)
        reports[tells] = run_policy("mell-plus", settings, load, SchedulerChoices()).report.by_class
        assert {name: one.requests for name, one in reports[tells].items()} == {
            "high": load.priority.count(-1),
            "normal": load.priority.count(0),
        }
    assert reports[True]["high"].queueing_s.mean < 0.5 * reports[False]["high"].queueing_s.mean
    assert reports[True]["high"].queueing_s.mean < 0.5 * reports[True]["normal"].queueing_s.mean
