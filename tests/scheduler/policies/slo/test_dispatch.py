"""Promises of which worker gets a request under targets: each from a state that is laid out by hand."""

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.events import WorkerPace
from melld.scheduler.policies.slo.constants import TTFT_PART
from melld.scheduler.policies.slo.dispatch import Dispatch, Prompt
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Request, Worker
from melld.scheduler.targets import Targets
from tests.scheduler.driving import lay_out, scheduler_with

TTFT_S, ITL_S = 2.0, 0.05
LONGEST_S = TTFT_PART * TTFT_S
"""What a placement may plan until a first token."""
SMALL = Prompt(0.0, {})


def laid_out(*loads: dict[str, int], itl_s: float | None = ITL_S, growth_bytes_s: float = 0.0) -> Scheduler:
    """Workers of 1000 bytes with these requests, ten seconds after the start."""
    targets = Targets(itl_s=itl_s, ttft_s=TTFT_S)
    scheduler = scheduler_with(len(loads), "mell-slo", cluster=ClusterSettings(targets=targets))
    scheduler.cluster.now_s = 10.0
    lay_out(scheduler, *loads, growth_bytes_s=growth_bytes_s)
    return scheduler


def learn(scheduler: Scheduler, base_s: float, decode_s: float, byte_s: float = 0.0) -> None:
    """Steps take so long, and so much longer for each request and byte."""
    for number in range(2000):
        decodes, kv_bytes = 1.0 + number % 20, 50.0 * (number % 17)
        pace = WorkerPace(base_s + decode_s * decodes + byte_s * kv_bytes, decodes, kv_bytes)
        scheduler.policy.steps.observe(Worker("like the mean", 1000, 64, 0, 1), pace)


def busy(
    scheduler: Scheduler, worker: str, prompt_s: float, name: str = "x", *, due_s: float = 0.0, urgent: bool = False
) -> None:
    """The worker has just accepted a prompt, whose first token is due before all others."""
    cluster = scheduler.cluster
    load = scheduler.policy.dispatch.loads.of(cluster.workers[worker], cluster.now_s)
    load.accept(RequestId(name), prompt_s, cluster.now_s, (not urgent, due_s), 0.0)


def make_urgent(scheduler: Scheduler, *names: str) -> None:
    """These requests are of high priority."""
    for name in names:
        request = scheduler.cluster.requests[RequestId(name)]
        request.priority = -1
        assert request.worker is not None
        request.worker.urgent += 1


def newcomer(kv_bytes: int = 10, arrived_s: float = 10.0) -> Request:
    """A request that has just come."""
    return Request(RequestId("new"), kv_bytes, 0, 99, arrived_s)


def able(
    scheduler: Scheduler, request: Request | None = None, prompt: Prompt = SMALL, serving: int = 9, packed: bool = False
) -> str | None:
    """The name of the worker that is chosen."""
    dispatch: Dispatch = scheduler.policy.dispatch
    worker = dispatch.able(request or newcomer(), prompt, serving, packed)
    return worker and worker.id


def test_a_request_goes_where_the_first_token_comes_first() -> None:
    """All else is equal."""
    scheduler = laid_out({"a": 10}, {"b": 10}, {"c": 10})
    for worker, prompt_s in (("w0", 0.6), ("w1", 0.3), ("w2", 0.5)):
        busy(scheduler, worker, prompt_s)
    assert able(scheduler) == "w1"


def test_a_request_goes_where_steps_are_shortest() -> None:
    """That worker is the farthest from the promised pace."""
    scheduler = laid_out(
        {f"a{number}": 10 for number in range(6)}, {"b": 10}, {f"c{number}": 10 for number in range(3)}
    )
    learn(scheduler, 0.02, 0.001)
    assert able(scheduler) == "w1"


@pytest.mark.parametrize(("prompt_s", "waited_s", "backlog_s"), [(0.5, 0.0, 0.5), (0.2, 0.5, 0.3), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("itl_s", [ITL_S, None])
def test_a_first_token_must_come_well_in_time(
    prompt_s: float, waited_s: float, backlog_s: float, itl_s: float | None
) -> None:
    """What it has waited, what the worker computes first, and its own prompt."""
    for more_s, chosen in ((-0.01, "w0"), (0.01, None)):
        scheduler = laid_out({"a": 10}, itl_s=itl_s)
        busy(scheduler, "w0", backlog_s + LONGEST_S - 1.0 + more_s)
        assert able(scheduler, newcomer(10, 10.0 - waited_s), Prompt(prompt_s, {})) == chosen


def test_a_question_does_not_count_the_book_that_it_overtakes() -> None:
    """The book is due later, so the worker computes it later; nobody is overtaken who would be late for it."""
    for due_s, chosen in ((90.0, "w0"), (10.0 + 30.3, "w0"), (10.0 + 30.1, None), (10.5, None)):
        scheduler = laid_out({"a": 10})
        busy(scheduler, "w0", 30.0, due_s=due_s)
        assert able(scheduler, None, Prompt(0.2, {})) == chosen, due_s
    assert scheduler.policy.dispatch.least_missed(newcomer(), Prompt(0.2, {}))[0] == 1.0


def test_who_has_begun_does_not_count_what_it_waited() -> None:
    """Its reader has the first token."""
    scheduler = laid_out({"a": 10})
    request = newcomer(10, 0.0)
    assert able(scheduler, request) is None
    request.placed_s = 1.0
    assert able(scheduler, request) == "w0"


def test_a_long_prompt_is_given_more_time() -> None:
    """Four times what it takes alone: where its beginning is known it may queue for the rest of that."""
    scheduler = laid_out({"a": 10})
    busy(scheduler, "w0", 2.0)
    assert able(scheduler, None, Prompt(0.5, {})) is None
    assert able(scheduler, None, Prompt(1.0, {})) == "w0"


def test_a_worker_must_last() -> None:
    """Else the request would soon be moved; a lone one may take any worker that takes it."""
    assert able(laid_out({"a": 500}, growth_bytes_s=1.0), newcomer(480)) == "w0"
    assert able(laid_out({"a": 500}, growth_bytes_s=1.0), newcomer(484)) is None
    assert able(laid_out({}, growth_bytes_s=1.0), newcomer(995)) == "w0"
    assert able(laid_out({"a": 500}), newcomer(501)) is None


def test_nobody_is_moved_to_where_it_is() -> None:
    """A choice of a worker for a request that runs is of another one."""
    scheduler = laid_out({"a": 10}, {"b": 10, "c": 10})
    learn(scheduler, 0.02, 0.001)
    request = scheduler.cluster.requests[RequestId("a")]
    assert able(scheduler, request) == "w1"
    assert scheduler.policy.dispatch.least_missed(request, SMALL)[1].id == "w1"


def test_steps_must_keep_the_pace() -> None:
    """With this request, its bytes, what all grow by in three seconds, and beside the prompts."""
    for more, chosen in ((0, "w0"), (1, None)):
        scheduler = laid_out({})
        learn(scheduler, 0.02, 0.002)
        most = max(count for count in range(40) if scheduler.policy.steps.step_s(None, count, count) <= ITL_S)
        scheduler = laid_out({f"r{number}": 1 for number in range(most - 1 + more)})
        learn(scheduler, 0.02, 0.002)
        assert able(scheduler, newcomer(1)) == chosen
    for kv_bytes, growth_bytes_s, prompt_s, chosen in (
        (180, 0.0, 0.0, "w0"),
        (230, 0.0, 0.0, None),
        (150, 5.0, 0.0, "w0"),
        (150, 13.0, 0.0, None),
        (150, 0.0, 0.4, "w0"),
        (150, 0.0, 1.5, None),
    ):
        scheduler = laid_out({"a": 100}, growth_bytes_s=growth_bytes_s)
        learn(scheduler, 0.02, 0.0, 0.0001)
        assert able(scheduler, newcomer(kv_bytes), Prompt(prompt_s, {})) == chosen


def test_who_is_leaving_slows_no_steps() -> None:
    """Its bytes and its place in the batch are free soon."""
    scheduler = laid_out({"a": 150, "b": 200}, {"c": 500})
    learn(scheduler, 0.02, 0.0, 0.0001)
    assert able(scheduler, newcomer(100)) is None
    scheduler.cluster.assign(scheduler.cluster.requests[RequestId("b")], scheduler.cluster.workers["w1"], Reason.DRAIN)
    assert able(scheduler, newcomer(100)) == "w0"


def test_a_worker_that_is_slower_than_others_is_given_less() -> None:
    """Its own steps count, not those of the mean."""
    scheduler = laid_out({"a": 10}, {"b": 10, "c": 10})
    learn(scheduler, 0.02, 0.0005)
    assert able(scheduler) == "w0"
    steps = scheduler.policy.steps
    for _ in range(100):
        steps.observe(scheduler.cluster.workers["w0"], WorkerPace(2.0 * steps.step_s(None, 1.0, 10.0), 1.0, 10.0))
    assert able(scheduler) == "w1"


def test_only_workers_in_service_are_spread_over() -> None:
    """Others are taken where none of those is able, and of them the fullest."""
    scheduler = laid_out({"a": 10}, {"b": 20}, {"c": 30}, {"d": 25})
    busy(scheduler, "w0", 0.1)
    assert able(scheduler, serving=4) != "w0"
    assert able(scheduler, serving=1) == "w0"
    busy(scheduler, "w0", 5.0)
    assert able(scheduler, serving=1) == "w2"
    assert able(scheduler, serving=2) == "w1"
    for worker in ("w1", "w2"):
        busy(scheduler, worker, 5.0)
    assert able(scheduler, serving=1) == "w3"
    busy(scheduler, "w3", 5.0)
    assert able(scheduler, serving=1) is None


def test_a_worker_beyond_the_service_is_taken_before_others_are_slowed_much() -> None:
    """It is awake anyway; but it may not sleep if each newcomer goes there."""
    for decoding, chosen in ((1, "w0"), (9, "w1")):
        scheduler = laid_out({f"a{number}": 10 for number in range(decoding)}, {"b": 10})
        learn(scheduler, 0.03, 0.0)
        for number in range(decoding):
            busy(scheduler, "w0", 0.001, f"a{number}")
        scheduler.cluster.now_s = 10.5
        request, prompt = newcomer(10, 10.5), Prompt(1.2, {})
        assert able(scheduler, request, prompt, serving=1) == chosen
        busy(scheduler, "w1", 5.0)
        assert able(scheduler, request, prompt, serving=1) == "w0"


def test_large_requests_are_packed_where_memory_sets_the_number() -> None:
    """Spread evenly, no worker would have room for the next large one."""
    for size, packed, chosen in ((81, True, "w1"), (79, True, "w0"), (81, False, "w0")):
        scheduler = laid_out({"a": size}, {"b": size, "c": size})
        busy(scheduler, "w1", 0.3)
        assert able(scheduler, packed=packed) == chosen


def test_a_prompt_goes_where_it_slows_nobody() -> None:
    """Who has decoded for long below the pace can make up for it; who has just begun cannot."""
    scheduler = laid_out({"a": 10}, {"b": 10})
    learn(scheduler, 0.03, 0.0)
    busy(scheduler, "w0", 0.001, "a")
    scheduler.cluster.now_s = 30.0
    busy(scheduler, "w1", 0.001, "b")
    scheduler.cluster.now_s = 30.1
    request, prompt = newcomer(10, 30.1), Prompt(1.5, {})
    assert able(scheduler, request, prompt) == "w0"
    scheduler.policy.dispatch.left(RequestId("b"), [None, scheduler.cluster.workers["w1"]])
    busy(scheduler, "w0", 0.01)
    assert able(scheduler, request, prompt) == "w1"


def test_a_move_takes_along_what_a_request_was_delayed() -> None:
    """On the new worker it is as easily slowed as on the old one."""
    scheduler = laid_out({"a": 10}, {})
    learn(scheduler, 0.03, 0.0)
    busy(scheduler, "w0", 0.1, "a")
    busy(scheduler, "w0", 0.5)
    w0, w1 = (scheduler.cluster.workers[name] for name in ("w0", "w1"))
    dispatch = scheduler.policy.dispatch
    scheduler.cluster.now_s = 14.1
    dispatch.moved(RequestId("a"), w0, w1)
    assert list(dispatch.loads.of(w1, 14.1).delays(14.1)) == [(0.5, pytest.approx(3.5))]
    assert len(list(dispatch.loads.of(w0, 14.1).delays(14.1))) == 1


def test_where_nobody_is_able_the_fewest_shall_miss_a_target() -> None:
    """One whose first token is late is better than three that are slow: two on the worker, and this one."""
    crowd = {"a": 400, "b": 400}
    scheduler = laid_out(crowd, {"c": 10})
    learn(scheduler, 0.02, 0.0, 0.0001)
    busy(scheduler, "w1", 3.0)
    missed, worker = scheduler.policy.dispatch.least_missed(newcomer(), SMALL)
    assert (missed, worker.id) == (1.0, "w1")
    scheduler = laid_out(crowd)
    learn(scheduler, 0.02, 0.0, 0.0001)
    assert scheduler.policy.dispatch.least_missed(newcomer(), SMALL)[0] == 3.0
    scheduler = laid_out({"a": 200, "b": 155})
    learn(scheduler, 0.02, 0.0, 0.0001)
    beyond = scheduler.policy.steps.step_s(None, 3, 365) / ITL_S - 1.0
    assert 0.05 < beyond < 0.2
    assert scheduler.policy.dispatch.least_missed(newcomer(), SMALL)[0] == pytest.approx(3 * 2 * beyond)


def test_while_another_worker_wakes_those_that_overflow_meanwhile_are_missed() -> None:
    """None can leave before: a worker that fills until then is no better than a first token that is late."""
    scheduler = laid_out({"a": 400, "b": 400}, {}, itl_s=None, growth_bytes_s=10.0)
    dispatch, waking = scheduler.policy.dispatch, scheduler.cluster.workers[WorkerId("w1")]
    busy(scheduler, "w1", 3.0)
    assert dispatch.least_missed(newcomer(100), SMALL)[1].id == "w0"
    waking.wake_s = 8.0
    lacking_bytes = 800 + 100 + 3 * 10 * 8 - 1000
    missed, worker = dispatch.least_missed(newcomer(100), SMALL)
    assert (missed, worker.id) == (pytest.approx(lacking_bytes / 300), "w0")
    waking.wake_s = 30.0
    assert dispatch.least_missed(newcomer(100), SMALL)[1] is waking, "its first token is late, and nobody else's"
    assert laid_out({}).policy.dispatch.least_missed(newcomer(0), SMALL)[0] == 0.0, "a model without KV"


def test_without_a_pace_only_late_first_tokens_are_missed() -> None:
    """Of equals the first that was woken; a full worker is none."""
    scheduler = laid_out({"full": 995}, {"a": 10}, {"b": 10}, itl_s=None)
    dispatch = scheduler.policy.dispatch
    assert dispatch.least_missed(newcomer(), SMALL)[0] == 0.0
    assert dispatch.least_missed(newcomer(), SMALL)[1].id == "w1"
    busy(scheduler, "w1", 2.1)
    assert dispatch.least_missed(newcomer(), SMALL)[1].id == "w2"
    busy(scheduler, "w2", 2.1)
    missed, worker = dispatch.least_missed(newcomer(), SMALL)
    assert (missed, worker.id) == (1.0, "w1")
    assert dispatch.least_missed(newcomer(996), SMALL) == (0.0, None)


def test_a_waiting_request_is_too_late_if_no_idle_worker_could_serve_it_in_time() -> None:
    """Its prompt and what it has waited already take more than may be planned; who has begun is never too late."""
    dispatch = laid_out({}).policy.dispatch
    assert not dispatch.too_late(newcomer(10, 8.91), 0.5)
    assert dispatch.too_late(newcomer(10, 8.89), 0.5)
    assert not dispatch.too_late(newcomer(10, 8.89), 0.48)
    begun = newcomer(10, 0.0)
    begun.placed_s = 0.0  # the first second of a simulation
    assert not dispatch.too_late(begun, 0.5)


def test_others_leave_headroom_to_the_urgent_ones_of_a_worker() -> None:
    """Of its memory and of its pace, as long as another worker is able."""
    scheduler = laid_out({"a": 400} | {f"n{number}": 10 for number in range(10)}, {"b": 600})
    busy(scheduler, "w1", 1.4)
    assert able(scheduler, newcomer(300)) == "w0"
    make_urgent(scheduler, "a")
    assert able(scheduler, newcomer(200)) == "w0"
    assert able(scheduler, newcomer(300)) == "w1"
    learn(scheduler, 0.03, 0.0007)
    assert able(scheduler, newcomer(200)) == "w1"


def test_others_go_to_the_urgent_only_where_that_is_better_by_some() -> None:
    """However much room there is; the more of a worker's requests are urgent, the better it must be."""
    for urgent, chosen in ((0, "w0"), (1, "w0"), (2, "w1")):
        scheduler = laid_out(*({f"{worker}{number}": 10 for number in range(12)} for worker in "ab"))
        busy(scheduler, "w1", 1.2)
        make_urgent(scheduler, *("a0", "a1")[:urgent])
        assert able(scheduler) == chosen


def test_an_urgent_request_joins_urgent_ones_unless_it_waits_for_their_prompts() -> None:
    """So others have workers of their own, and their prompts slow no urgent request."""
    scheduler = laid_out({"a": 10}, {"b": 10})
    make_urgent(scheduler, "b")
    urgent = newcomer()
    urgent.priority = -1
    for prompt_s, chosen in ((0.1, "w1"), (0.2, "w0")):
        busy(scheduler, "w1", prompt_s, urgent=True)
        assert able(scheduler, urgent) == chosen


@pytest.mark.parametrize(
    ("urgent", "others", "chosen"), [("a", 10, "w1"), ("a", 14, "w0"), ("ab", 14, "w1"), ("ab", 24, "w0")]
)
def test_where_nobody_is_able_others_spare_the_urgent_up_to_a_point(urgent: str, others: int, chosen: str) -> None:
    """Beyond it, the later the more of a worker's requests are urgent, others would lose more than the urgent gain."""
    scheduler = laid_out({"a": 100, "b": 100}, {f"n{number}": 20 for number in range(others)})
    make_urgent(scheduler, *urgent)
    learn(scheduler, 0.02, 0.0, 0.001)
    missed, worker = scheduler.policy.dispatch.least_missed(newcomer(), SMALL)
    assert (missed, worker.id) == (others + 1 if chosen == "w1" else 3, chosen)


def test_the_prompt_of_an_urgent_request_waits_for_urgent_ones_alone() -> None:
    """Others' prompts do not make its first token late: a worker computes urgent ones first."""
    scheduler = laid_out({"a": 10})
    busy(scheduler, "w0", LONGEST_S + 1.0)
    assert able(scheduler) is None
    urgent = newcomer()
    urgent.priority = -1
    assert able(scheduler, urgent) == "w0"
    busy(scheduler, "w0", LONGEST_S + 1.0, urgent=True)
    assert able(scheduler, urgent) is None
