"""Where `mell-plus` places requests: each from a state laid out by hand."""

import msgspec

from melld.decisions.records import Record
from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.plus.policy import DRAINED
from melld.scheduler.priorities import Priorities
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, run_policy
from tests.scheduler.driving import arrive, lay_out, moved, of_kind, placed, scheduler_with
from tests.simulator.setups import FEW_GPUS, small_load

HORIZON_S = 2.0


def laid_out(*loads: dict[str, int], workers: int = 0, instant: bool = False, growth_bytes_s: float = 1.0) -> Scheduler:
    """Return workers of 1000 bytes with these requests, and sleeping ones; each request grows by a byte a second."""
    cluster = ClusterSettings(horizon_s=HORIZON_S, instant_moves=instant)
    scheduler = scheduler_with(workers or len(loads), "mell-plus", cluster=cluster)
    lay_out(scheduler, *loads, growth_bytes_s=growth_bytes_s)
    return scheduler


def shrink(scheduler: Scheduler, name: str, capacity_bytes: int) -> None:
    """Take room away from a worker."""
    scheduler.handle(e.WorkerCapacityChanged(0.0, WorkerId(name), capacity_bytes))


def epoch(scheduler: Scheduler) -> list[e.AnyCommand]:
    """Let the policy look at its workers."""
    return scheduler.handle(e.EpochStarted(1.0))


# ---- an arrival


def test_an_arrival_goes_to_the_tightest_worker_that_lasts() -> None:
    """Two grow by 20 bytes in ten seconds: that is long enough, and the roomier worker stays free."""
    assert placed(arrive(laid_out({"a": 500}, {"b": 100}), "new", 480)) == {"new": "w0"}
    assert placed(arrive(laid_out({"a": 500}, {"b": 100}), "new", 484)) == {"new": "w1"}


def test_if_no_worker_lasts_an_arrival_goes_to_the_longest_lived() -> None:
    """Rather than to the tightest; not where it would overflow before the next look."""
    scheduler = laid_out({"a": 500}, {"b": 490}, {"c": 510})
    assert placed(arrive(scheduler, "new", 496)) == {"new": "w1"}


def test_a_worker_is_woken_rather_than_one_filled_to_overflow() -> None:
    """There would be no time left to move anything."""
    assert placed(arrive(laid_out({"a": 500}, workers=2), "new", 499)) == {"new": "w1"}


def test_a_short_life_suffices_when_workers_are_looked_at_often() -> None:
    """Half a second is time for several looks: no worker is woken yet."""
    scheduler = scheduler_with(2, "mell-plus")
    lay_out(scheduler, {"a": 500}, growth_bytes_s=1.0)
    assert placed(arrive(scheduler, "new", 499)) == {"new": "w0"}


def test_an_arrival_that_fits_at_all_is_not_queued() -> None:
    """Ten requests soon need the room, but no sleeper is left to wake: better a move later than a queue now."""
    crowd = {f"r{number}": 50 for number in range(10)}
    assert placed(arrive(laid_out(crowd), "new", 495)) == {"new": "w0"}
    assert not placed(arrive(laid_out(crowd), "new", 501))


def test_a_request_that_must_leave_is_never_placed_where_it_is() -> None:
    """Whether another worker lasts, or has a little time, or just room."""
    for others in ([{"b": 600}], [{"b": 695}], [{f"r{number}": 69 for number in range(10)}], []):
        scheduler = laid_out({"a": 300}, *others)
        request = scheduler.cluster.requests[RequestId("a")]
        assert scheduler.policy.allocate(request, Reason.DRAIN) is bool(others)
        assert moved(scheduler.cluster.take_commands()) == ({"a": "w1"} if others else {})


def test_a_departure_may_free_exactly_the_room_needed() -> None:
    """A worker need not be woken for one byte more."""
    scheduler = laid_out({"a": 500, "b": 300}, {"c": 690}, workers=3, instant=True, growth_bytes_s=0.0)
    commands = arrive(scheduler, "new", 500)
    assert (moved(commands), placed(commands)) == ({"b": "w1"}, {"new": "w0"})
    commands = arrive(laid_out({"a": 500, "b": 300}, {"c": 690}, workers=3, instant=True), "new", 501)
    assert (moved(commands), placed(commands)) == ({}, {"new": "w2"})


def test_a_departure_frees_only_the_room_that_it_does_not_share() -> None:
    """What steps aside may have all its blocks in common with others."""
    scheduler = laid_out({"a": 500, "b": 300}, {"c": 501}, workers=3, instant=True, growth_bytes_s=0.0)
    scheduler.handle(e.WorkerSharingChanged(0.0, WorkerId("w0"), 300))
    commands = arrive(scheduler, "new", 600)
    assert (moved(commands), placed(commands)) == ({}, {"new": "w2"})


# ---- an overload


def test_a_request_goes_where_it_lives_longest() -> None:
    """The tighter worker would overflow five seconds later."""
    scheduler = laid_out({"a": 809, "b": 190}, {"c": 800}, {f"r{number}": 100 for number in range(5)})
    assert moved(epoch(scheduler)) == {"b": "w2"}


def test_a_chain_of_two_moves_avoids_waking_a_worker() -> None:
    """Where nothing fits directly, a third worker makes room first; of equals the elder goes."""
    scheduler = laid_out({"x": 499, "y": 499}, {"m": 300, "n": 400}, {"o": 660}, workers=4, instant=True)
    first, second = of_kind(epoch(scheduler), e.MoveRequest)
    assert (first.request, first.destination, first.reason) == ("m", "w2", Reason.MAKE_ROOM)
    assert (second.request, second.destination, second.reason) == ("x", "w1", Reason.OVERLOAD)
    assert first.urgency_s == second.urgency_s == 1.0


def test_a_chain_of_moves_need_only_relieve_the_source_briefly() -> None:
    """A worker that has lost its room is relieved as far as possible, by the request whose bytes it lacks."""
    loads = {"x": 300, "y": 400}, {"m": 300, "n": 400}, {"o": 660}
    scheduler = laid_out(*loads, workers=4, instant=True, growth_bytes_s=2.0)
    shrink(scheduler, "w0", 301)
    moves = of_kind(epoch(scheduler), e.MoveRequest)
    assert [(move.request, move.destination) for move in moves] == [("m", "w2"), ("y", "w1"), ("x", "w3")]


def test_moves_that_take_time_are_never_chained() -> None:
    """The second would wait for the first: a worker is woken at once."""
    commands = epoch(laid_out({"x": 499, "y": 499}, {"m": 300, "n": 400}, {"o": 660}, workers=4))
    assert moved(commands) == {"x": "w3"}


def test_one_sufficient_departure_is_made_even_if_it_wakes_a_worker() -> None:
    """Moving small requests that find room would be in vain."""
    scheduler = laid_out({"big": 500, "small": 100}, {"other": 800}, workers=3)
    shrink(scheduler, "w0", 400)
    (move,) = of_kind(epoch(scheduler), e.MoveRequest)
    assert (move.request, move.destination, move.urgency_s) == ("big", "w2", 0.0)


def test_if_several_must_leave_they_go_to_a_roomy_worker() -> None:
    """Before another is woken, and though tighter ones, in which they would fit but for growth, come first."""
    tight = [{f"{name}{number}": 69 for number in range(10)} for name in "xyz"]
    scheduler = laid_out({"a": 300, "b": 299, "c": 298}, *tight, {"d": 90}, workers=6)
    shrink(scheduler, "w0", 300)
    commands = epoch(scheduler)
    assert moved(commands) == {"a": "w4", "b": "w4"}
    assert not of_kind(commands, e.ActivateWorker)


def test_a_lone_urgent_request_goes_to_the_largest_worker() -> None:
    """Its own worker overflows in a second, and it lives longest there."""
    scheduler = laid_out({"long": 299}, {"a": 300}, {f"r{number}": 30 for number in range(9)})
    shrink(scheduler, "w0", 300)
    (move,) = of_kind(epoch(scheduler), e.MoveRequest)
    assert (move.request, move.destination, move.urgency_s) == ("long", "w1", 1.0)


# ---- a drain


def many_full(small: int, size: int) -> Scheduler:
    """Return two workers of one small request each, and 15 of one large request each."""
    return laid_out({"a": small}, {"b": small}, *({f"r{number}": size} for number in range(15)), instant=True)


def test_the_rest_stays_below_its_limit_after_every_drain() -> None:
    """Two of many workers may be emptied in one look, but each leaves less room for the next."""
    assert len(moved(epoch(many_full(10, 900)))) == 2
    assert len(moved(epoch(many_full(10, 950)))) == 1
    assert not moved(epoch(many_full(100, 995)))


def test_of_few_workers_all_surplus_ones_are_emptied_at_once() -> None:
    """A burst has ended: each look of delay costs as many workers."""
    scheduler = laid_out({"a": 10}, {"b": 10}, {"c": 10}, {"d": 500}, instant=True)
    assert moved(epoch(scheduler)) == {"a": "w3", "b": "w3", "c": "w3"}


def test_a_look_drains_a_bounded_number_of_requests() -> None:
    """Planning the moves of hundreds of workers would block the loop."""
    scheduler = laid_out(*({f"r{number}": 2} for number in range(400)), instant=True)
    assert len(of_kind(epoch(scheduler), e.MoveRequest)) == DRAINED


def test_empty_workers_do_not_block_a_drain() -> None:
    """They stay awake for a while, and there is nothing to move from them."""
    assert not moved(epoch(laid_out({}, {}, instant=True)))
    assert moved(epoch(laid_out({"a": 10}, {"b": 500}, *[{}] * 6, instant=True))) == {"a": "w1"}


# ---- classes


def test_an_urgent_arrival_goes_to_the_freest_worker_with_headroom() -> None:
    """Others leave a quarter of it free as long as they fit elsewhere, and no longer."""
    scheduler = laid_out({"a": 500}, {"b": 100})
    assert placed(arrive(scheduler, "urgent", 200, priority=-1)) == {"urgent": "w1"}
    assert placed(arrive(scheduler, "small", 300)) == {"small": "w0"}
    assert placed(arrive(scheduler, "within", 400)) == {"within": "w1"}
    assert placed(arrive(scheduler, "least", 60)) == {"least": "w0"}
    assert placed(arrive(scheduler, "nowhere else", 200)) == {"nowhere else": "w1"}


def test_ties_are_broken_towards_the_least_urgent() -> None:
    """An overfull worker sends away the batch job and not the chat."""
    for priorities, expected in (((0, 1, -1), "b"), ((-1, 0, 0), "b"), ((1, 1, 0), "a")):
        scheduler = laid_out({"a": 332, "b": 332, "c": 332}, {})
        for name, priority in zip("abc", priorities, strict=True):
            scheduler.cluster.requests[RequestId(name)].priority = priority
        assert moved(epoch(scheduler)) == {expected: "w1"}


def test_priorities_change_nothing_where_all_are_normal() -> None:
    """The same events with the settings on and off give the same decisions; no large request waits."""
    load = small_load(rate_per_s=4.0)
    load = msgspec.structs.replace(load, prompt_tokens=[min(tokens, 150) for tokens in load.prompt_tokens])
    for policy in ("mell-plus", "mell-slo"):
        logs = []
        for priorities in (Priorities(), Priorities(headroom=0.0, age_s=1e9, hole_s=0.0)):
            log: list[Record] = []
            choices = SchedulerChoices(priorities=priorities)
            run_policy(policy, msgspec.structs.replace(FEW_GPUS, targets=Targets(0.03)), load, choices, log.append)
            logs.append(log[1:])  # the first record tells the settings
        assert logs[0] == logs[1]
        assert len(logs[0]) > 500
