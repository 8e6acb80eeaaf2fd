"""Promises of `mell-slo` about waking, waiting and sleeping: each from a state that is laid out by hand."""

import math

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.slo.constants import MOST_PRICE_S
from melld.scheduler.roles import Role, RoleSettings
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import DEFAULT_ITL_S, Targets
from tests.scheduler.driving import arrive, finish, lay_out, moved, of_kind, placed, scheduler_with

ITL_S, TTFT_S = 0.05, 2.0
TOKENS = 400
TARGETS = Targets(itl_s=ITL_S, ttft_s=TTFT_S)
MIXED = RoleSettings()


def laid_out(
    *loads: dict[str, int],
    workers: int = 0,
    targets: Targets | None = TARGETS,
    retire_after_s: float | None = None,
    instant: bool = False,
    roles: RoleSettings = MIXED,
) -> Scheduler:
    """Workers with these requests, others asleep, ten seconds after the start."""
    cluster = ClusterSettings(targets=targets, retire_after_s=retire_after_s, instant_moves=instant, roles=roles)
    scheduler = scheduler_with(workers or len(loads), "mell-slo", cluster=cluster)
    scheduler.cluster.now_s = 10.0
    lay_out(scheduler, *loads)
    return scheduler


def learn(scheduler: Scheduler, token_s: float = 0.0, base_s: float = 0.02, byte_s: float = 0.0) -> None:
    """Prompts take so long for each token, steps so long, and so much longer for each byte."""
    for number in range(500):
        decodes, kv_bytes, tokens = 1.0 + number % 20, 50.0 * (number % 17), 100 + 100 * (number % 7)
        step_s = base_s + byte_s * kv_bytes
        pace = e.WorkerPace(step_s, decodes, kv_bytes, prompts=1, prompt_tokens=tokens, prefill_s=token_s * tokens)
        scheduler.policy.paced({scheduler.cluster.workers[WorkerId("w0")]: pace})


def come(scheduler: Scheduler, name: str = "new", at_s: float = 10.0, **facts: object) -> list[e.AnyCommand]:
    """A small request with a prompt of 400 tokens."""
    return scheduler.handle(e.RequestArrived(at_s, RequestId(name), 5, TOKENS, **facts))  # type: ignore[arg-type]


def crowd(count: int, name: str = "r", kv_bytes: int = 1) -> dict[str, int]:
    """So many requests."""
    return {f"{name}{number}": kv_bytes for number in range(count)}


def slow(*loads: dict[str, int], workers: int = 0, targets: Targets = TARGETS) -> Scheduler:
    """Each byte takes a tenth of a millisecond: beyond 300 bytes on a worker steps are too slow."""
    scheduler = laid_out(*loads, workers=workers, targets=targets)
    learn(scheduler, base_s=0.02, byte_s=0.0001)
    return scheduler


# ---- waking


def test_a_worker_is_woken_where_that_saves_more_than_a_few_misses() -> None:
    """Three slow answers are cheaper than a GPU; eleven are not.  Memory and prompts ask for none."""
    few = slow({"a": 400, "b": 400}, workers=2)
    few.policy.demand.look = lambda *_: None
    assert placed(come(few)) == {"new": "w0"}
    many = slow(crowd(10, kv_bytes=80), workers=2)
    many.policy.demand.look = lambda *_: None
    commands = come(many)
    assert [one.worker for one in of_kind(commands, e.ActivateWorker)] == ["w1"]
    assert placed(commands) == {"new": "w1"}


def test_workers_are_woken_before_memory_is_full() -> None:
    """By the number that the load needs, at an arrival and at each look."""
    scheduler = laid_out({"a": 500}, workers=4)
    assert not of_kind(arrive(scheduler, "b", 10, 10.0), e.ActivateWorker)
    scheduler = laid_out({"a": 500, "b": 470}, {"c": 960}, workers=5)
    woken = of_kind(scheduler.handle(e.EpochStarted(10.0)), e.ActivateWorker)
    assert [one.worker for one in woken] == ["w2"]
    assert not of_kind(scheduler.handle(e.EpochStarted(11.0)), e.ActivateWorker)


def test_growth_is_expected_before_any_was_seen() -> None:
    """A worker that wakes is not filled with prompts: all of them will grow, and none can leave while others wake."""
    scheduler = laid_out(workers=3)
    for worker in scheduler.cluster.workers.values():
        scheduler.handle(e.WorkerWakeTimeChanged(10.0, worker.id, 8.0))
    for number in range(70):
        scheduler.handle(e.RequestArrived(10.0 + number / 10, RequestId(f"r{number}"), 13, 130))
    first, second = (scheduler.cluster.workers[WorkerId(name)] for name in ("w0", "w1"))
    growth_bytes_s, wakes_later_s = 13 / 130 / DEFAULT_ITL_S, second.active_s - first.active_s
    assert wakes_later_s > 1.0
    assert 900 < first.used_bytes + first.count * growth_bytes_s * wakes_later_s <= 1000


def test_while_a_worker_wakes_requests_go_where_they_do_least_harm() -> None:
    """A second one would come no sooner, and nobody is told to wait or sent away."""
    scheduler = slow(crowd(10, kv_bytes=80), workers=3)
    scheduler.policy.demand.look = lambda *_: None
    scheduler.handle(e.WorkerWakeTimeChanged(10.0, WorkerId("w1"), 30.0))
    scheduler.handle(e.WorkerWakeTimeChanged(10.0, WorkerId("w2"), 30.0))
    assert placed(come(scheduler, "first")) == {"first": "w1"}
    assert placed(come(scheduler, "second")) == {"second": "w1"}


# ---- waiting


def test_with_all_workers_in_use_a_request_that_would_harm_others_waits() -> None:
    """Unless the operator wants nobody sent away; who has begun goes on at once."""
    assert not placed(come(slow({"a": 400, "b": 400})))
    assert placed(come(slow({"a": 100, "b": 100}))) == {"new": "w0"}
    kind = slow({"a": 400, "b": 400}, targets=Targets(itl_s=ITL_S, ttft_s=TTFT_S, sheds=False))
    assert placed(come(kind)) == {"new": "w0"}
    scheduler = slow({"a": 400, "b": 400}, {"c": 10})
    assert placed(scheduler.handle(e.WorkerDown(10.0, WorkerId("w1")))) == {"c": "w0"}


def test_an_urgent_request_waits_only_where_most_are_urgent() -> None:
    """Others make way for it; among its likes it is one of many."""
    for urgent, is_placed in ((0, True), (1, True), (2, False)):
        scheduler = slow({"a": 400, "b": 400})
        scheduler.cluster.workers[WorkerId("w0")].urgent = urgent
        assert bool(placed(come(scheduler, priority=-1))) is is_placed
    assert not placed(come(slow({"a": 400, "b": 400}), priority=1))


def test_who_has_waited_too_long_is_sent_away_and_not_before() -> None:
    """While a worker sleeps or wakes nobody is; without targets never."""
    scheduler = slow({"a": 400, "b": 400})
    come(scheduler)
    assert not of_kind(scheduler.handle(e.EpochStarted(11.5)), e.ShedRequest)
    (shed,) = of_kind(scheduler.handle(e.EpochStarted(11.7)), e.ShedRequest)
    assert shed.request == "new"
    scheduler = laid_out({"a": 999}, targets=None)
    come(scheduler)
    assert not of_kind(scheduler.handle(e.EpochStarted(100.0)), e.ShedRequest)


def test_an_idle_worker_takes_what_fills_it() -> None:
    """Else a long prompt waits beside it until it is too late, and all behind it wait, too."""
    scheduler = laid_out({"a": 400}, {"c": 10})
    scheduler.cluster.growth.bytes_per_s = 10.0
    for at_s in (10.0, 11.0):
        scheduler.handle(e.EpochStarted(at_s))
    finish(scheduler, "c", 11.0)
    assert placed(arrive(scheduler, "new", 995, 11.0)) == {"new": "w1"}


# ---- what is learned


def test_a_prompt_s_load_is_what_is_not_cached() -> None:
    """The worker is busy for the rest alone; one token is always computed."""
    for cached, left_s in ((0, 0.4), (300, 0.1), (400, 0.001), (500, 0.001)):
        scheduler = laid_out({"a": 5})
        learn(scheduler, token_s=0.001)
        come(scheduler, cached_tokens={WorkerId("w0"): cached} if cached else {})
        load = scheduler.policy.dispatch.loads.of(scheduler.cluster.workers[WorkerId("w0")], 10.0)
        assert load.backlog_s(10.0) == pytest.approx(left_s, rel=0.05, abs=0.002)
        assert scheduler.policy.demand._lasting.mean(10.0, 1.0) == pytest.approx(left_s / 60.0, rel=0.05, abs=1e-4)


def test_answers_that_ended_teach_and_those_that_never_began_do_not() -> None:
    """A request that was cancelled before its first token says nothing about its pace."""
    scheduler = laid_out(crowd(100, "a"), crowd(100, "b"), crowd(100, "c"))
    learn(scheduler)
    policy = scheduler.policy
    before = policy.dispatch.answers.longer(64)
    for name in crowd(100, "a"):
        scheduler.handle(e.RequestFinished(20.0, RequestId(name)))
    assert (policy.feedback.price_s, policy.dispatch.answers.longer(64)) == (10.0, before)
    for name in {**crowd(100, "b"), **crowd(100, "c")}:  # 90 tokens in nine seconds, the first after three
        event = e.RequestFinished(22.0, RequestId(name), first_token_s=13.0, output_tokens=91)
        scheduler.handle(event)
    assert policy.feedback.price_s == MOST_PRICE_S  # twice so many as may were late, again, and then all were slow
    assert policy.feedback.caution == pytest.approx(0.25 * 1.15)
    assert policy.dispatch.answers.longer(64) > before


def test_who_moves_takes_its_load_along_and_who_ends_has_none() -> None:
    """Whether it ends on its worker or on the way to another."""
    scheduler = laid_out({}, {"b": 5})
    learn(scheduler, token_s=0.001)
    w0, w1 = (scheduler.cluster.workers[WorkerId(name)] for name in ("w0", "w1"))
    loads = scheduler.policy.dispatch.loads
    come(scheduler)
    scheduler.handle(e.MoveAsked(11.0, RequestId("new"), WorkerId("w1")))
    assert len(list(loads.of(w0, 11.0).delays(11.0))) == 1
    scheduler.handle(e.MoveAborted(11.5, RequestId("new"), WorkerId("w1")))
    assert len(list(loads.of(w0, 11.5).delays(11.5))) == 1
    scheduler.handle(e.MoveAsked(11.6, RequestId("new"), WorkerId("w1")))
    scheduler.handle(e.MoveCommitted(12.0, RequestId("new"), WorkerId("w1")))
    assert (list(loads.of(w0, 12.0).delays(12.0)), len(list(loads.of(w1, 12.0).delays(12.0)))) == ([], 1)
    finish(scheduler, "new", 13.0)
    assert list(loads.of(w1, 13.0).delays(13.0)) == []


# ---- sleeping


def test_in_service_no_worker_sleeps() -> None:
    """Nor while it wakes; beyond the service one sleeps as soon as the operator says."""
    scheduler = laid_out({"a": 5}, {}, {}, retire_after_s=7.0)
    policy, workers = scheduler.policy, scheduler.cluster.workers
    policy.demand.workers = 2
    scheduler.cluster.now_s = 12.0
    assert policy.sleeps_in_s(workers[WorkerId("w1")]) == math.inf
    assert policy.sleeps_in_s(workers[WorkerId("w2")]) == 5.0
    workers[WorkerId("w2")].wake_s = 1.0
    assert policy.sleeps_in_s(workers[WorkerId("w2")]) == math.inf


def test_without_an_operator_s_word_a_worker_sleeps_when_waking_it_again_is_cheaper() -> None:
    """Its price is the waking and what a late start costs."""
    scheduler = laid_out({"a": 5}, {}, workers=3)
    scheduler.handle(e.WorkerWakeTimeChanged(10.0, WorkerId("w2"), 4.0))
    policy, worker = scheduler.policy, scheduler.cluster.workers[WorkerId("w1")]
    policy.demand.workers = 1
    policy.gaps.needed(2, 10.0)
    policy.gaps.needed(1, 10.0)
    scheduler.cluster.now_s = 13.0
    assert policy.sleeps_in_s(worker) == pytest.approx(4.0 + policy.feedback.price_s - 3.0)


def test_a_worker_beyond_the_service_is_emptied_as_soon_as_it_may_sleep() -> None:
    """The last streams of many would keep a GPU awake for their sake alone; one whose prompt waits stays."""
    scheduler = laid_out({"a": 5}, {"b": 7, "c": 6}, {})
    policy, cluster = scheduler.policy, scheduler.cluster
    policy.demand.look, policy.demand.workers = lambda *_: None, 2
    scheduler.handle(e.RequestsGrew(10.0, {RequestId("b"): 8}))
    assert not moved(scheduler.handle(e.EpochStarted(10.0)))
    policy.demand.workers = 1
    assert not moved(scheduler.handle(e.EpochStarted(11.0)))
    kept_s = policy.feedback.price_s
    assert not moved(scheduler.handle(e.EpochStarted(11.5 + kept_s)))
    scheduler.handle(e.RequestsGrew(12.0 + kept_s, {RequestId("c"): 7}))
    assert moved(scheduler.handle(e.EpochStarted(12.0 + kept_s))) == {"b": "w0", "c": "w0"}
    for name in "bc":
        scheduler.handle(e.MoveCommitted(12.1 + kept_s, RequestId(name)))
    commands = scheduler.handle(e.EpochStarted(12.5 + kept_s))
    assert "w1" in [one.worker for one in of_kind(commands, e.RetireWorker)]
    assert not cluster.workers[WorkerId("w1")].count


def test_a_worker_beyond_the_service_keeps_what_no_other_would_take() -> None:
    """Nor does anyone leave where an operator says when workers sleep, or go to where only prompts run."""
    fixed = RoleSettings(fixed={WorkerId("w0"): Role.PREFILL})
    for kv_bytes, after_s, roles, goes in (
        (10, None, MIXED, True),
        (990, None, MIXED, False),
        (10, 3.0, MIXED, False),
        (10, None, fixed, False),
    ):
        scheduler = laid_out({} if roles is fixed else {"a": 30}, {"b": kv_bytes}, retire_after_s=after_s, roles=roles)
        policy = scheduler.policy
        policy.demand.look, policy.demand.workers = lambda *_: None, 2
        scheduler.handle(e.RequestsGrew(10.0, {RequestId("b"): kv_bytes + 1}))
        scheduler.handle(e.EpochStarted(10.0))
        policy.demand.workers = 1
        scheduler.handle(e.EpochStarted(11.0))
        kept_s = policy.feedback.price_s
        assert bool(moved(scheduler.handle(e.EpochStarted(12.0 + kept_s)))) is goes


def test_without_targets_it_sleeps_and_drains_as_mell_plus() -> None:
    """Nothing is promised, so nothing is kept awake."""
    for targets, instant in ((None, True), (TARGETS, True)):
        scheduler = laid_out({"a": 10}, {"b": 500}, targets=targets, instant=instant, retire_after_s=0.0)
        commands = scheduler.handle(e.EpochStarted(11.0))
        assert moved(commands) == {"a": "w1"}
        assert [one.worker for one in of_kind(commands, e.RetireWorker)] == ["w0"]
    assert not moved(laid_out({"a": 10}, {"b": 500}).handle(e.EpochStarted(11.0))), "an awake GPU costs the same"


def test_a_large_request_wakes_nobody() -> None:
    """One that comes by chance does not say that more will follow."""
    scheduler = laid_out({"r0": 500}, workers=2)
    scheduler.handle(e.EpochStarted(10.0))
    assert placed(arrive(scheduler, "large", 300, 11.0)) == {"large": "w0"}
    assert not of_kind(scheduler.handle(e.EpochStarted(14.0)), e.ActivateWorker)
