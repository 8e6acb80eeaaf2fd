"""The shadow of best fit: what the status says was saved is what a run of best fit would have cost."""

import msgspec
import pytest

from melld.daemon.shadow import AwakeSeconds, Shadow
from melld.scheduler import events as e
from melld.scheduler.events import AnyCommand, AnyEvent
from melld.scheduler.scheduler import SchedulerSettings
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from tests.scheduler.driving import scheduler_with
from tests.simulator.setups import SMALL, scheduler, small_load

ROOMY = msgspec.structs.replace(SMALL, capacity_bytes=4 * SMALL.capacity_bytes)


def simulated(policy: str, seed: int, machines: SimulatorSettings = SMALL) -> tuple[float, float, Shadow]:
    """Worker-seconds awake in a simulation, the same by the daemon's meter, and what the shadow made of it."""
    deciding = scheduler(policy, machines)
    shadow, awake = Shadow(deciding.settings), AwakeSeconds()
    decide = deciding.handle

    def heard(event: AnyEvent) -> list[AnyCommand]:
        commands = decide(event)
        awake.note(deciding.cluster)
        shadow.hear(event)
        return commands

    deciding.handle = heard  # type: ignore[method-assign]
    load = small_load(seed) if machines is SMALL else small_load(seed, rate_per_s=8.0, seconds=200.0)
    measures = Simulation(machines, load, deciding).run()
    return measures.awake_gpu_s, awake.total, shadow


@pytest.mark.parametrize("seed", range(4))
def test_the_shadow_of_best_fit_is_best_fit(seed: int) -> None:
    """Where the daemon itself runs best fit nothing is saved, and nothing lost; and the meter is the simulator's."""
    simulators, meters, shadow = simulated("best-fit", seed)
    assert simulators == pytest.approx(meters, rel=1e-9) == pytest.approx(shadow.awake.total, rel=1e-9)


@pytest.mark.parametrize("policy", ["mell-plus", "worst-fit"])
def test_the_shadow_of_another_policy_is_close_to_best_fit(policy: str) -> None:
    """What the status says was saved is about what a run of best fit on the same requests would have cost more."""
    _, _, shadow = simulated(policy, 1, ROOMY)
    best_fit, _, _ = simulated("best-fit", 1, ROOMY)
    assert shadow.awake.total == pytest.approx(best_fit, rel=0.06)


def test_packing_saves_and_spreading_does_not() -> None:
    """The sign of the figure tells an operator whether the policy earns its moves."""
    _, packed, shadow = simulated("mell-plus", 1, ROOMY)
    assert packed < shadow.awake.total
    _, spread, shadow = simulated("worst-fit", 1, ROOMY)
    assert spread > shadow.awake.total


def fed(*happened: AnyEvent, retire_after_s: float = 0.0) -> Shadow:
    """A shadow with two workers of 1000 bytes that has heard these events."""
    shadow = Shadow(SchedulerSettings(retire_after_s=retire_after_s))
    for event in (e.WorkerUp(0.0, "w0", 1000), e.WorkerUp(0.0, "w1", 1000), *happened):
        shadow.hear(event)
    return shadow


def test_an_overflow_is_a_preemption_for_as_long_as_it_lasts() -> None:
    """Best fit cannot move what has grown too large: what it pays for that is counted, once for each time."""
    both = [e.RequestArrived(0.0, "r1", 400), e.RequestArrived(0.0, "r2", 400)]
    shadow = fed(*both, e.RequestsGrew(10.0, {"r1": 600, "r2": 600}), e.RequestsGrew(20.0, {"r1": 700}))
    assert (shadow.preemptions, shadow.awake.until(20.0)) == (1, 20.0)
    shadow.hear(e.RequestFinished(21.0, "r1"))
    shadow.hear(e.RequestArrived(22.0, "r3", 300))
    shadow.hear(e.RequestsGrew(23.0, {"r3": 500}))
    assert (shadow.preemptions, shadow.awake.until(23.0)) == (2, 23.0)


def test_moves_of_the_real_run_are_not_heard() -> None:
    """The shadow's requests are where best fit put them, not where the daemon moved them."""
    moves = [e.MoveAsked(1.0, "r1", "w1"), e.MoveCommitted(2.0, "r1", "w1"), e.RequestPreempted(3.0, "r1")]
    shadow = fed(e.RequestArrived(0.0, "r1", 400), *moves, e.RequestFinished(4.0, "r1"), e.EpochStarted(5.0))
    assert shadow.awake.until(9.0) == 5.0


def test_what_requests_share_is_shared_in_the_shadow_too() -> None:
    """A common system prompt is no saving of ours: best fit would not have needed another worker for it either."""
    chats = [e.RequestArrived(0.0, f"r{number}", 300) for number in range(3)]
    shared = fed(*chats, e.WorkerSharingChanged(1.0, "w1", 500), e.RequestArrived(2.0, "r4", 300))
    alone = fed(*chats, e.RequestArrived(2.0, "r4", 300))
    assert (shared.awake.until(9.0), alone.awake.until(9.0)) == (9.0, 16.0)


def test_an_idle_worker_counts_until_the_same_rule_retires_it() -> None:
    """Savings come from packing, never from a stricter rule for one side."""
    events = [e.RequestArrived(0.0, "r1", 400), e.RequestFinished(4.0, "r1"), e.EpochStarted(8.0), e.EpochStarted(14.0)]
    assert fed(*events, retire_after_s=10.0).awake.until(99.0) == 14.0


def test_the_sum_runs_on_between_events() -> None:
    """A status that is asked for between two events is as of now."""
    awake, deciding = AwakeSeconds(), scheduler_with(2)
    deciding.handle(e.RequestArrived(10.0, "r1", 400))
    awake.note(deciding.cluster)
    assert [awake.until(now_s) for now_s in (10.0, 12.5, 9.0)] == [0.0, 2.5, 0.0]
    assert msgspec.structs.astuple(deciding.settings)[1] == 0.0
