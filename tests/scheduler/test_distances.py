"""Workers on several machines: KV goes only within one, so moves stay within one where they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.roles import Role, RoleSettings
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import Targets
from tests.scheduler.driving import arrive, lay_out, moved, of_kind, placed, scheduler_with

TARGETS = Targets(itl_s=0.05, ttft_s=2.0)


def two_machines(
    *loads: dict[str, int], policy: str = "mell-slo", kv: bool = False, growth_bytes_s: float = 0.0
) -> Scheduler:
    """Return two workers on each machine, with these requests, at ten seconds."""
    cluster = ClusterSettings(targets=TARGETS, kv_between_machines=kv)
    scheduler = scheduler_with(len(loads), policy, cluster=cluster, per_machine=2)
    scheduler.cluster.now_s = 10.0
    lay_out(scheduler, *loads, growth_bytes_s=growth_bytes_s)
    return scheduler


def relieved(scheduler: Scheduler) -> dict[str, str]:
    """Return the moves of the second of two epochs, a second apart."""
    return {k: v for at_s in (11.0, 12.0) for k, v in moved(scheduler.handle(e.EpochStarted(at_s))).items()}


@pytest.mark.parametrize("policy", ["mell-slo", "mell-plus"])
def test_an_overloaded_worker_sends_a_request_to_a_neighbour(policy: str) -> None:
    """Though a worker of another machine would last longer, as where KV can be sent anywhere."""
    loads = {"a": 200, "b": 190, "x": 180, "y": 170, "z": 240}, {"c": 700}, {"d": 20}, {"e": 25}
    anywhere = two_machines(*loads, policy=policy, kv=True, growth_bytes_s=10.0)
    assert set(relieved(anywhere).values()) == {"w3"}
    assert set(relieved(two_machines(*loads, policy=policy, growth_bytes_s=10.0)).values()) == {"w1"}


@pytest.mark.parametrize("policy", ["mell-slo", "mell-plus"])
def test_without_room_nearby_it_goes_to_another_machine(policy: str) -> None:
    """Its tokens are recomputed: dearer than a copy, but no stream is preempted."""
    loads = {"a": 500, "b": 490}, {"c": 900}, {"d": 20}, {"e": 25}
    assert set(relieved(two_machines(*loads, policy=policy, growth_bytes_s=10.0)).values()) == {"w3"}


def test_a_remote_awake_worker_beats_a_remote_sleeping_one() -> None:
    """Else those that must leave wait for it, with room kept on both, and are preempted meanwhile."""
    loads = {"a": 500, "b": 490}, {"c": 900}, {"d": 420}, {}
    scheduler = two_machines(*loads, growth_bytes_s=10.0)
    scheduler.cluster.workers[WorkerId("w3")].wake_s = 8.0
    assert set(relieved(scheduler).values()) == {"w2"}


def test_a_waking_worker_is_soon_awake_only_if_near() -> None:
    """And awake by the next look; on another machine the request's prompt is computed first."""
    scheduler = two_machines({"a": 500}, {}, {})
    source, near, far = (scheduler.cluster.workers[WorkerId(name)] for name in ("w0", "w1", "w2"))
    outlook = scheduler.policy.outlook
    for scheduler.cluster.now_s in (10.0, 11.0):
        outlook.next_epoch()
    for wakes_s, soon in ((0.0, (True, True)), (1.0, (True, False)), (1.5, (False, False))):
        near.wake_s = far.wake_s = 1.0 + wakes_s  # since 10.0
        assert (outlook.is_awake_soon(near, source), outlook.is_awake_soon(far, source)) == soon


@pytest.mark.parametrize("kv", [True, False])
def test_a_worker_beyond_the_service_is_emptied_only_by_copies(kv: bool) -> None:
    """Recomputing streams elsewhere would cost what sleeping sooner saves."""
    scheduler = two_machines({"a": 5}, {"x": 5}, {"b": 5}, kv=kv)
    demand = scheduler.policy.demand
    demand.look, demand.workers = lambda *_: None, 3
    scheduler.handle(e.RequestsGrew(10.0, {RequestId("b"): 6}))
    scheduler.handle(e.EpochStarted(10.0))
    demand.workers = 2
    scheduler.handle(e.EpochStarted(11.0))
    assert ("b" in moved(scheduler.handle(e.EpochStarted(60.0)))) is kv


@pytest.mark.parametrize("kv", [True, False])
def test_a_draining_worker_prefers_a_neighbour_to_recomputing(kv: bool) -> None:
    """Where KV goes everywhere, the least loaded worker takes them."""
    scheduler = two_machines({"a": 300}, {"b": 500}, {"c": 5}, {"d": 600}, kv=kv, growth_bytes_s=0.1)
    scheduler.policy.demand.look, scheduler.policy.demand.workers = lambda *_: None, 4
    pace = e.WorkerPace(0.02, 1.0, 300.0, prompts=1, prompt_tokens=100, prefill_s=0.1)
    for number in range(300):
        scheduler.handle(e.WorkersPaced(10.0 + number / 1000, {WorkerId("w1"): pace}))
    arrive(scheduler, "new", 1, 11.0)  # now it is known how many tokens a byte is
    commands = scheduler.handle(e.WorkerDraining(12.0, WorkerId("w0")))
    assert moved(commands)["a"] == ("w2" if kv else "w1")


def test_machines_in_use_are_filled_before_another_is_started() -> None:
    """Even by workers that became known last, as those of a returned machine."""
    scheduler = scheduler_with(4, "best-fit", per_machine=2)
    for name in ("w0", "w1"):
        scheduler.handle(e.WorkerDown(0.0, WorkerId(name)))
    for name in ("w0", "w1"):
        scheduler.handle(e.WorkerUp(1.0, WorkerId(name), 1000))
    found = [placed(arrive(scheduler, f"r{number}", 900, 2.0))[f"r{number}"] for number in range(4)]
    assert found == ["w0", "w1", "w2", "w3"]


def test_a_hand_over_stays_on_its_machine() -> None:
    """It is a copy of KV: the only decode worker is on another machine, so the request stays."""
    roles = RoleSettings(fixed={WorkerId("w0"): Role.PREFILL, WorkerId("w1"): Role.DECODE})
    for per_machine, reasons in ((1, set()), (2, {"role"})):
        cluster = ClusterSettings(targets=TARGETS, roles=roles)
        scheduler = scheduler_with(2, "mell-slo", cluster=cluster, per_machine=per_machine)
        lay_out(scheduler, {}, {})
        commands = arrive(scheduler, "new", 5, 10.0)
        commands += [one for at_s in (10.1, 10.2) for one in scheduler.handle(e.EpochStarted(at_s))]
        assert placed(commands) == {"new": "w0"}
        assert {one.reason for one in of_kind(commands, e.MoveRequest)} == reasons


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans(), st.data())
def test_neighbours_are_the_others_of_a_machine_unless_none_is_remote(
    machines: list[int], kv: bool, data: st.DataObject
) -> None:
    """The tightest comes first; a sleeping worker is not one."""
    scheduler = scheduler_with(0, "best-fit", cluster=ClusterSettings(kv_between_machines=kv))
    for number, machine in enumerate(machines):
        scheduler.handle(e.WorkerUp(0.0, WorkerId(f"w{number}"), 1000, machine=machine))
    awake = data.draw(st.integers(1, len(machines)))
    lay_out(scheduler, *({f"r{number}": data.draw(st.integers(0, 1000))} for number in range(awake)))
    workers, distances = list(scheduler.cluster.workers.values()), scheduler.cluster.distances
    assert distances.some_are_far == (len(set(machines)) > 1 and not kv)
    for one in workers:
        near = [other for other in workers[:awake] if other is not one and not distances.is_far(one, other)]
        near.sort(key=lambda other: (1000 - other.used_bytes, other.order))
        assert distances.neighbours(one) == (near if distances.some_are_far else [])
        assert all(distances.is_far(one, other) == (one.machine != other.machine and not kv) for other in workers)
