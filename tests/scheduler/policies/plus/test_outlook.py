"""The arithmetic of `mell-plus`: how long workers last, and how long moves take."""

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.plus.outlook import CAUTION, FOREVER_S, FORGETTING, MoveTimes, Outlook, leaves_wholly
from melld.scheduler.policies.plus.plans import plan_drain
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker
from tests.scheduler.driving import lay_out, scheduler_with

HORIZON_S = 2.0


def laid_out(
    *loads: dict[str, int], growth_bytes_s: float = 1.0, slots: int = 100, instant: bool = False
) -> tuple[Outlook, list[Worker]]:
    """Return the outlook of workers of 1000 bytes with these requests, each growing by a byte a second."""
    cluster = ClusterSettings(horizon_s=HORIZON_S, instant_moves=instant)
    scheduler = scheduler_with(len(loads), "mell-plus", slots, cluster)
    lay_out(scheduler, *loads, growth_bytes_s=growth_bytes_s)
    return scheduler.policy.outlook, list(scheduler.cluster.workers.values())


def move(outlook: Outlook, name: str, worker: Worker) -> None:
    """Start a move of the request."""
    outlook.cluster.assign(outlook.cluster.requests[RequestId(name)], worker, Reason.OVERLOAD)


# ---- moves


def test_a_move_s_time_grows_with_its_bytes() -> None:
    """A line through past moves; never negative, and never falling with size."""
    times = MoveTimes()
    assert times.expected_s(100) == 0.0
    times.took(100, 1.0)
    assert times.expected_s(100) == times.expected_s(300) == 1.0
    times.took(200, 3.0)
    assert times.expected_s(150) == pytest.approx(2.0)
    assert times.expected_s(300) == pytest.approx(5.0)
    assert times.expected_s(10) == 0.0
    falling = MoveTimes()
    falling.took(100, 3.0)
    falling.took(200, 1.0)
    assert falling.expected_s(100) == falling.expected_s(400) == pytest.approx((FORGETTING * 3.0 + 1.0) / 1.98)


def test_newer_moves_count_more() -> None:
    """A link that has become slow is soon known to be."""
    times = MoveTimes()
    for _ in range(100):
        times.took(100, 1.0)
        times.took(200, 2.0)
    for _ in range(100):
        times.took(100, 3.0)
        times.took(200, 5.0)
    assert times.expected_s(100) == pytest.approx(3.0, abs=0.1)
    assert times.expected_s(200) == pytest.approx(5.0, abs=0.1)


# ---- lives


def test_a_worker_s_life_is_its_free_bytes_over_its_growth() -> None:
    """Including requests on their way in, and without those on their way out."""
    outlook, (source, taker) = laid_out({"a": 300, "b": 200}, {"c": 400})
    assert outlook.life_s(source) == 250.0
    assert outlook.life_s(source, 100, 2) == 100.0
    move(outlook, "b", taker)
    assert outlook.life_s(source) == 700.0
    assert outlook.life_s(taker) == 200.0
    assert outlook.bytes_ahead(source) == 300 + HORIZON_S
    assert outlook.bytes_ahead(taker) == 600 + 2 * HORIZON_S


def test_without_growth_a_worker_lasts_forever_unless_overfull() -> None:
    """An empty one too."""
    outlook, (worker, empty) = laid_out({"a": 900}, {}, growth_bytes_s=0.0)
    assert outlook.life_s(empty) == outlook.life_s(worker) == outlook.life_s(worker, 100) == FOREVER_S
    assert outlook.life_s(worker, 101) == -FOREVER_S


def test_relief_comes_after_the_next_look_and_a_move() -> None:
    """The mean request's, with a margin; with instant moves nothing is waited for."""
    for instant in (False, True):
        outlook, (worker, empty) = laid_out({"a": 300, "b": 200}, {}, instant=instant)
        assert outlook.look_s(worker) == HORIZON_S
        outlook.next_epoch()
        outlook.cluster.now_s = 5.0
        outlook.next_epoch()
        assert outlook.look_s(worker) == (HORIZON_S if instant else 5.0)
        outlook.moves.took(250, 4.0)
        outlook.moves.took(350, 6.0)
        assert outlook.look_s(worker) == pytest.approx(HORIZON_S if instant else 5.0 + CAUTION * 4.0)
        assert outlook.look_s(empty) == pytest.approx(HORIZON_S if instant else 5.0)


def test_growth_is_the_worker_s_own_else_the_mean_else_the_default() -> None:
    """A freshly woken worker grows as the others do, and the very first one at the default rate."""
    outlook, (worker,) = laid_out({"a": 300}, growth_bytes_s=0.0)
    assert outlook.growth_bytes_s(worker) == 0.0
    outlook.expect_growth(3.0)
    assert outlook.growth_bytes_s(worker) == 3.0
    outlook.cluster.growth.bytes_per_s = 2.0
    assert outlook.growth_bytes_s(worker) == 2.0
    worker.growth_bytes_s = 1.0
    assert outlook.growth_bytes_s(worker) == 1.0


def test_others_crowd_urgent_ones_by_their_bytes_or_slots() -> None:
    """A part of both is kept for the urgent; a leaving request has no slot any more."""
    for requests, kv_bytes, crowds in (
        ({"a": 100}, 650, False),
        ({"a": 100}, 651, True),
        ({f"r{number}": 1 for number in range(7)}, 1, False),
        ({f"r{number}": 1 for number in range(8)}, 1, True),
    ):
        outlook, (worker, other) = laid_out(requests, {}, slots=10)
        worker.urgent = 1
        request = Request(RequestId("new"), kv_bytes, 0, 99)
        assert outlook.crowds(request, worker) is crowds
        assert not outlook.crowds(request, other)
    move(outlook, "r0", other)
    assert not outlook.crowds(request, worker)


def test_a_worker_is_overloaded_if_it_overflows_before_the_next_look() -> None:
    """Or if it has lost slots; not if enough is leaving."""
    for size, overloaded in ((996, False), (997, True)):
        outlook, (worker, other) = laid_out({"a": size - 100, "b": 100}, {})
        assert outlook.overloaded(worker) is overloaded
        assert not outlook.overloaded(other)
        move(outlook, "b", other)
        assert not outlook.overloaded(worker)
    outlook, (worker, other) = laid_out({"a": 10, "b": 10, "c": 10}, {})
    outlook.cluster.resize_worker(worker, 1000, 2)
    assert outlook.overloaded(worker)
    move(outlook, "b", other)
    assert not outlook.overloaded(worker)


def test_moves_are_overdue_if_the_worker_overflows_before_they_end() -> None:
    """Until then all its requests grow on it."""
    for size, overdue in ((980, False), (981, True)):
        outlook, (worker, other) = laid_out({"a": size - 100, "b": 100}, {})
        outlook.next_epoch()
        outlook.cluster.now_s = 10.0
        outlook.next_epoch()
        assert not outlook.overdue(worker)
        move(outlook, "b", other)
        assert outlook.overdue(worker) is overdue


def test_a_worker_takes_what_fits_with_growth_until_the_next_look() -> None:
    """And has a slot for it.  An empty one takes whatever it can hold: no other has more room."""
    outlook, (worker, empty) = laid_out({"a": 500}, {}, slots=3)
    assert outlook.takes(empty, 1000)
    assert not outlook.takes(empty, 1001)
    assert outlook.takes(worker, 496)
    assert not outlook.takes(worker, 497)
    assert outlook.takes(worker, 494, 2)
    assert not outlook.takes(worker, 495, 2)
    assert not outlook.takes(worker, 10, 3)


def test_nothing_joins_a_worker_that_is_being_emptied() -> None:
    """It is about to sleep; but one that a request is on its way to goes on."""
    outlook, (source, taker) = laid_out({"a": 100}, {"b": 100})
    assert not leaves_wholly(source)
    assert {worker.id for worker in outlook.roomiest(5)} == {"w0", "w1"}
    assert outlook.tightest(10, 5, taker) == [source]
    move(outlook, "a", taker)
    assert leaves_wholly(source)
    assert not outlook.takes(source, 10)
    assert outlook.roomiest(5) == outlook.tightest(10, 5, None) == [taker]
    move(outlook, "b", source)
    assert not leaves_wholly(source)


def test_at_most_the_requested_number_of_workers_is_examined() -> None:
    """The nearest: the tightest that take it, or the roomiest."""
    outlook, workers = laid_out({"a": 300}, {"b": 500}, {"c": 400}, {"d": 996})
    assert outlook.tightest(100, 2, None) == [workers[1], workers[2]]
    assert outlook.tightest(100, 2, workers[1]) == [workers[2], workers[0]]
    assert outlook.roomiest(2) == [workers[0], workers[2]]


def test_only_requests_that_leave_before_the_overflow_move() -> None:
    """If there is none, any of them may try."""
    outlook, (worker,) = laid_out({"large": 600, "small": 380})
    requests = list(worker.requests.values())
    outlook.moves.took(380, 8.0)
    outlook.moves.took(600, 9.0)
    assert outlook.life_s(worker) == CAUTION * 8.0
    assert [one.id for one in outlook.in_time(worker, requests)] == ["small"]
    outlook.cluster.grow({RequestId("small"): 385})
    assert outlook.in_time(worker, requests) == requests


# ---- a drain


def test_a_drain_leaves_all_takers_a_life_after_the_next_look() -> None:
    """The largest goes first, each to the tightest worker that lasts."""
    outlook, (source, tight, roomy) = laid_out({"small": 100, "large": 200}, {"a": 777}, {"b": 500})
    plan = plan_drain(source, outlook, 10.0, 12)
    assert plan is not None
    assert [(request.id, taker.id) for request, taker in plan] == [("large", "w2"), ("small", "w1")]
    plan = plan_drain(source, outlook, 9.0, 12)
    assert plan is not None
    assert [(request.id, taker.id) for request, taker in plan] == [("large", "w1"), ("small", "w2")]
    assert plan_drain(source, outlook, 300.0, 12) is None
    assert tight.count == roomy.count == 1, "it is a plan"


def test_a_drain_overfills_no_taker_and_uses_no_empty_one() -> None:
    """Earlier requests of the plan count; an empty worker would only be the next to drain."""
    outlook, (source, *_) = laid_out({"x": 200, "y": 200}, {"a": 570}, {})
    assert plan_drain(source, outlook, 10.0, 12) is None
    outlook, (source, *_) = laid_out({"x": 200, "y": 200}, {"a": 560}, {})
    plan = plan_drain(source, outlook, 10.0, 12)
    assert plan is not None
    assert [taker.id for _, taker in plan] == ["w1", "w1"]


def test_a_drain_may_go_to_a_roomier_worker() -> None:
    """If that then lasts exactly as long as it must."""
    outlook, (source, _) = laid_out({"x": 300, "y": 300}, {"a": 364})
    plan = plan_drain(source, outlook, 10.0, 12)
    assert plan is not None
    assert [taker.id for _, taker in plan] == ["w1", "w1"]


def test_a_worker_with_an_immovable_request_is_not_drained() -> None:
    """Half of a drain frees nothing."""
    outlook, (source, _) = laid_out({"x": 20, "y": 20}, {"a": 500})
    outlook.cluster.pin(outlook.cluster.requests[RequestId("x")])
    assert plan_drain(source, outlook, 1.0, 12) is None


def test_the_deadline_allows_for_one_block_each() -> None:
    """Memory is taken in blocks: all requests may take their next one at once."""
    scheduler = scheduler_with(0, "mell-plus")
    scheduler.handle(e.WorkerUp(0.0, WorkerId("w0"), 1000, block_bytes=40))
    lay_out(scheduler, {"a": 100})
    outlook = scheduler.policy.outlook
    for second in range(1, 6):
        scheduler.handle(e.RequestsGrew(float(second), {RequestId("a"): 100 + 4 * second}))
        scheduler.handle(e.EpochStarted(float(second)))
    rate = scheduler.cluster.growth.bytes_per_s
    assert rate > 0.0
    assert outlook.look_s(scheduler.cluster.workers[WorkerId("w0")]) == pytest.approx(1.0 + 40 / rate)
