"""Promises of how many workers the load needs."""

import pytest

from melld.ids import WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.events import WorkerPace
from melld.scheduler.policies.slo.answers import Answers
from melld.scheduler.policies.slo.constants import CALM_S, GROWTH_S, LEAST_GROWTH_S, MEAN_S
from melld.scheduler.policies.slo.demand import Demand
from melld.scheduler.policies.slo.models import StepModel
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Worker
from melld.scheduler.targets import Targets
from tests.scheduler.driving import arrive, finish, lay_out, scheduler_with

ITL_S = 0.05


def demand_of(scheduler: Scheduler, steps: StepModel | None = None, missed: float = 0.01) -> Demand:
    """The demand of the scheduler's requests."""
    return Demand(scheduler.cluster, Targets(attainment=1.0 - missed), steps or StepModel(), Answers())


def look(
    demand: Demand,
    scheduler: Scheduler,
    at_s: float = 0.0,
    itl_s: float | None = None,
    ahead_s: float = 0.0,
) -> int:
    """Look at that time; the workers that are in service then."""
    scheduler.cluster.now_s = at_s
    demand.look(itl_s, ahead_s, 0.0)
    return demand.workers


def holding(*sizes: int, retire_after_s: float | None = None) -> Scheduler:
    """Worker w0 of 1000 bytes with these requests r0, r1, ..."""
    scheduler = scheduler_with(4, cluster=ClusterSettings(retire_after_s=retire_after_s))
    lay_out(scheduler, {f"r{number}": size for number, size in enumerate(sizes)})
    return scheduler


def linear(base_s: float, decode_s: float) -> StepModel:
    """Steps that take so long, and so much longer for each request."""
    steps, worker = StepModel(), Worker("w0", 1000, 64, 0, 1)
    for number in range(600):
        decodes = 1.0 + number % 60
        steps.observe(worker, WorkerPace(base_s + decode_s * decodes, decodes, float(number % 7)))
    return steps


# ---- memory


@pytest.mark.parametrize(("size", "workers"), [(0, 0), (1, 1), (940, 1), (941, 2)])
def test_memory_is_filled_to_a_part(size: int, workers: int) -> None:
    """What a new worker needs to fill is left free."""
    scheduler = holding(size) if size else holding()
    demand = demand_of(scheduler)
    assert look(demand, scheduler) == workers


def test_who_waits_is_counted_and_who_moves_is_counted_once() -> None:
    """Both are one request to serve."""
    scheduler = holding(600)
    arrive(scheduler, "waits", 500)
    for number in range(1, 4):
        scheduler.handle(e.WorkerDown(0.0, f"w{number}"))
    assert look(demand_of(scheduler), scheduler) == 2
    scheduler = holding(500)
    scheduler.handle(e.MoveAsked(0.0, "r0", "w1"))
    demand = demand_of(scheduler)
    assert sum(worker.used_bytes for worker in scheduler.cluster.workers.values()) == 1000
    assert look(demand, scheduler) == 1


def test_recent_growth_goes_on() -> None:
    """25 bytes a second: in 34 seconds it is 950."""
    scheduler = holding(100)
    demand = demand_of(scheduler)
    assert look(demand, scheduler, 1.0, ahead_s=30.0) == 1
    scheduler.cluster.grow({"r0": 200})
    assert look(demand, scheduler, 2.0, ahead_s=30.0) == 2, "as if it had taken LEAST_GROWTH_S"
    assert LEAST_GROWTH_S == 4.0
    demand = demand_of(scheduler)
    assert look(demand, scheduler, 2.0, ahead_s=29.0) == 1
    scheduler.cluster.grow({"r0": 360})
    assert look(demand, scheduler, 10.0, ahead_s=28.0) == 1
    assert look(demand, scheduler, 10.0, ahead_s=30.0) == 2


@pytest.mark.parametrize(("later_s", "workers"), [(0.9 + GROWTH_S, 2), (1.0 + GROWTH_S, 1)])
def test_old_growth_is_over(later_s: float, workers: int) -> None:
    """A load that has stood for a while is expected to stand."""
    scheduler = holding(100)
    demand = demand_of(scheduler)
    look(demand, scheduler, 0.0)
    scheduler.cluster.grow({"r0": 500})
    assert look(demand, scheduler, 1.0) == 1
    assert look(demand, scheduler, later_s, ahead_s=30.0) == workers


@pytest.mark.parametrize(("requests", "workers"), [(1, 1), (40, 2)])
def test_one_large_request_does_not_say_that_more_will_follow(requests: int, workers: int) -> None:
    """Many that fill as much do."""
    scheduler = holding(100)
    demand = demand_of(scheduler)
    look(demand, scheduler, 0.0)
    for number in range(requests):
        scheduler.cluster.grow({"r0": 100 + 400 * (number + 1) // requests})
        demand.accept(0.0, 400 // requests)
    assert look(demand, scheduler, 8.0, ahead_s=16.0) == workers
    assert look(demand, scheduler, 9.0 + GROWTH_S) <= workers
    assert look(demand, scheduler, 60.0, ahead_s=1000.0) == 1, "what came long ago counts no more"


def test_a_load_that_falls_is_not_expected_to_fall_on() -> None:
    """Workers would be given back too soon."""
    scheduler = holding(930, 15)
    demand = demand_of(scheduler)
    look(demand, scheduler, 0.0)
    finish(scheduler, "r1")
    demand = demand_of(scheduler)
    assert look(demand, scheduler, 4.0, ahead_s=1000.0) == 1


# ---- hysteresis


@pytest.mark.parametrize(("retire_after_s", "calm_s"), [(None, CALM_S), (60.0, CALM_S), (3.0, 3.0)])
def test_the_number_falls_once_less_was_enough_for_a_while(retire_after_s: float | None, calm_s: float) -> None:
    """By a stricter measure, and no longer than workers without requests stay awake."""
    scheduler = holding(850, 40, 20, 50, retire_after_s=retire_after_s)
    demand = demand_of(scheduler)
    assert look(demand, scheduler, 0.0) == 2
    finish(scheduler, "r3")  # 910: enough for one, but not strictly
    assert look(demand, scheduler, 1.0) == 2
    assert look(demand, scheduler, 50.0) == 2
    finish(scheduler, "r2", 50.0)
    assert look(demand, scheduler, 51.0) == 2
    assert look(demand, scheduler, 50.0 + calm_s) == 2
    assert look(demand, scheduler, 50.1 + calm_s) == 1


def test_the_number_rises_at_once() -> None:
    """Waking takes long enough."""
    scheduler = holding(850, 40)
    demand = demand_of(scheduler)
    assert look(demand, scheduler, 0.0) == 1
    scheduler.cluster.grow({"r0": 920})
    assert look(demand, scheduler, 0.1) == 2


# ---- prompts and pace


@pytest.mark.parametrize(("prompt_s", "workers"), [(7.1, 1), (7.3, 2), (14.3, 2), (14.5, 3)])
def test_prompts_may_fill_a_part_of_the_time(prompt_s: float, workers: int) -> None:
    """Just after the start a fifth of a minute stands for the whole."""
    scheduler = holding(1)
    demand = demand_of(scheduler)
    demand.accept(prompt_s, 0)
    assert look(demand, scheduler) == workers


def test_prompts_are_forgotten() -> None:
    """After a minute a steady stream is seen as it is: nine tenths of a second each second take two workers."""
    scheduler = holding(1)
    demand = demand_of(scheduler)
    for second in range(300):
        scheduler.cluster.now_s = float(second)
        demand.accept(0.9, 0)
        assert second < 30 or look(demand, scheduler, float(second)) == 2
    assert look(demand, scheduler, 300.0 + MEAN_S) == 1


@pytest.mark.parametrize(("prompts", "workers"), [(1, 1), (40, 2)])
def test_a_sudden_burst_counts_at_once_and_one_long_prompt_does_not(prompts: int, workers: int) -> None:
    """Four seconds of prompts within one: over a minute that is little, but as forty of them it is no chance."""
    scheduler = holding(1)
    demand = demand_of(scheduler)
    demand.accept(0.001, 0)
    for number in range(prompts):
        scheduler.cluster.now_s = 300.0 + number / prompts
        demand.accept(4.0 / prompts, 0)
    assert look(demand, scheduler, 301.0) == workers
    assert look(demand, scheduler, 310.0 + CALM_S) == 1


def test_by_prompts_too_the_number_falls_by_a_stricter_measure() -> None:
    """Else a load at the limit would wake a worker every minute."""
    scheduler = holding(1)
    for prompt_s, workers in ((6.4, 1), (6.6, 2)):
        demand = demand_of(scheduler)
        demand.accept(prompt_s, 0)
        demand.workers = 2
        assert look(demand, scheduler) == workers


def test_steps_must_keep_the_pace() -> None:
    """A millisecond for each of forty is too much for one worker; less than one request each helps nobody."""
    steps = linear(0.02, 0.001)
    crowd = holding(*[1] * 40)
    assert look(demand_of(crowd, steps), crowd, itl_s=ITL_S) == 2
    assert look(demand_of(crowd, steps), crowd, itl_s=None) == 1
    assert look(demand_of(crowd, steps), crowd, itl_s=0.031) == 4
    few = holding(1, 1, 1)
    assert look(demand_of(few, steps), few, itl_s=0.001) == 3


def test_prompts_take_time_from_the_steps() -> None:
    """Two workers would keep the pace if they did nothing else."""
    crowd = holding(*[1] * 40)
    demand = demand_of(crowd, linear(0.02, 0.001))
    demand.accept(5.4, 0)
    assert look(demand, crowd, itl_s=ITL_S) == 3


def test_who_lets_more_be_slow_needs_fewer() -> None:
    """Prompts come at random, and large ones more so than many small ones of the same sum."""
    steps = linear(0.02, 0.0005)

    def needed(prompts_s: list[float], missed: float) -> int:
        crowd = holding(*[1] * 50)
        demand = demand_of(crowd, steps, missed)
        for prompt_s in prompts_s:
            demand.accept(prompt_s, 0)
        demand.look(ITL_S, 0.0, 1.0)
        return demand.workers

    assert needed([2.0, 2.0], 0.01) > needed([2.0, 2.0], 0.2)
    assert needed([3.9, 0.1], 0.01) > needed([0.02] * 200, 0.01) >= 1


def test_while_no_worker_is_known_memory_asks_for_none() -> None:
    """Whoever waits when all workers have died does not ask for hundreds of them, or for millions of real requests."""
    scheduler = holding(300, 300, 300)
    for number in range(4):
        scheduler.handle(e.WorkerDown(0.0, worker=WorkerId(f"w{number}")))
    assert sum(one.kv_bytes for one in scheduler.cluster.waiting.requests.values()) == 900
    assert look(demand_of(scheduler), scheduler) <= 3
