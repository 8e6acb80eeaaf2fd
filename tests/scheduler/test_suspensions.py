"""Suspensions: as the last resort a low request yields its room to a high one, and resumes ahead of its class."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.cli.why import in_words
from melld.decisions.records import decision_record, fact_records
from melld.decisions.stories import stories_of
from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.priorities import Priorities
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler
from tests.effort import examples
from tests.scheduler.driving import arrive, finish, lay_out, moved, of_kind, placed, scheduler_with
from tests.scheduler.law import check_cluster
from tests.scheduler.machine import PolicyMachine


def full(policy: str = "mell-plus", **settings: float | bool) -> Scheduler:
    """Return two full workers with low requests of 200 and 300 bytes on the one and of 250 on the other."""
    scheduler = scheduler_with(2, policy, cluster=ClusterSettings(priorities=Priorities(**settings)))  # type: ignore[arg-type]
    lay_out(scheduler, {"n": 500, "low200": 200, "low300": 300}, {"m": 750, "low250": 250})
    for name, request in scheduler.cluster.requests.items():
        request.priority = int(name.startswith("low"))
    return scheduler


def epoch(scheduler: Scheduler, at_s: float) -> list[e.AnyCommand]:
    """Look at the queue again."""
    return scheduler.handle(e.EpochStarted(at_s))


def high(scheduler: Scheduler, kv_bytes: int, at_s: float = 0.0, name: str = "high") -> list[e.AnyCommand]:
    """Add a high request that finds no room and waits until the next epoch."""
    assert of_kind(arrive(scheduler, name, kv_bytes, at_s, -1), e.QueueRequest)
    return epoch(scheduler, at_s)


def suspended(commands: list[e.AnyCommand]) -> dict[str, str]:
    """Return the suspensions: request to worker."""
    return {c.request: c.worker for c in of_kind(commands, e.SuspendRequest)}


@pytest.mark.parametrize(("kv_bytes", "loser", "worker"), [(150, "low200", "w0"), (220, "low250", "w1")])
@pytest.mark.parametrize("policy", ["mell-plus", "mell-slo"])
def test_the_smallest_sufficient_request_is_suspended(policy: str, kv_bytes: int, loser: str, worker: str) -> None:
    """The high one is placed at once; the low one is queued ahead of newcomers of its class."""
    scheduler = full(policy)
    commands = high(scheduler, kv_bytes)
    assert suspended(commands) == {loser: worker}
    assert placed(commands) == {"high": worker}
    assert [c.request for c in of_kind(commands, e.QueueRequest)] == [loser]
    check_cluster(scheduler.cluster)
    arrive(scheduler, "newcomer", 100, 1.0, 1)
    assert next(iter(placed(finish(scheduler, "high", 2.0)).items())) == (loser, worker)


def test_nothing_is_suspended_where_one_alone_does_not_suffice() -> None:
    """Two together would; the high one waits."""
    assert suspended(high(full(), 310)) == {}


def test_only_requests_of_the_high_class_cause_suspensions() -> None:
    """Ageing does not count: a normal one waits, however long."""
    scheduler = full()
    arrive(scheduler, "normal", 150)
    for at_s in (0.0, 70.0, 140.0):
        assert suspended(epoch(scheduler, at_s)) == {}


def test_only_low_unpinned_resting_requests_are_suspended() -> None:
    """If none of three low ones may leave, none does."""
    scheduler = full()
    requests = scheduler.cluster.requests
    scheduler.cluster.pin(requests[RequestId("low200")])
    requests[RequestId("low250")].priority = 0
    low = requests[RequestId("low300")]
    low.state = low.after("move")
    assert suspended(high(scheduler, 150)) == {}


def test_moves_and_sleeping_workers_come_first() -> None:
    """Where a hole can be made, or a worker woken, nothing is suspended."""
    scheduler = scheduler_with(2, "mell-plus")
    lay_out(scheduler, {"n": 550, "low300": 300}, {"m": 600})
    scheduler.cluster.requests[RequestId("low300")].priority = 1
    commands = high(scheduler, 410)
    assert moved(commands) == {"low300": "w1"}
    assert suspended(commands) == {}
    scheduler = full()
    scheduler.handle(e.WorkerUp(0.0, WorkerId("w2"), 1000, 100))
    commands = arrive(scheduler, "high", 150, 1.0, -1)
    assert set(placed(commands).values()) == {"w2"}
    assert suspended(commands) == {}


def test_nothing_is_suspended_if_switched_off_or_the_policy_may_refuse() -> None:
    """`suspend` false; the paper's policy."""
    assert suspended(high(full(suspend=False), 150)) == {}
    assert suspended(high(full("mell"), 150)) == {}


def test_a_request_is_suspended_twice_at_most_and_ten_seconds_apart() -> None:
    """The same low one yields its room again only later, and the third time never."""
    scheduler = scheduler_with(1, "mell-plus")
    lay_out(scheduler, {"n": 800})
    assert placed(arrive(scheduler, "low", 200, 0.0, 1))

    def again(at_s: float) -> bool:
        found = suspended(high(scheduler, 150, at_s))
        finish(scheduler, "high", at_s + 0.1)
        return bool(found)

    assert [again(at_s) for at_s in (1.0, 10.9, 11.1, 40.0)] == [True, False, True, False]
    check_cluster(scheduler.cluster)


def test_the_log_and_the_story_record_a_suspension() -> None:
    """The low one's story says where it was, for what, and that its tokens are kept."""
    commands = high(full(), 150)
    arrived = fact_records(e.RequestArrived(0.0, RequestId("low200"), 200, 200))
    place = decision_record(0.0, e.PlaceRequest(Reason.ARRIVAL, RequestId("low200"), WorkerId("w0"), 200))
    stories = stories_of([*arrived, place, *(decision_record(1.0, command) for command in commands)])
    text = in_words(stories.story("low200"))
    assert "suspended on w0, tokens so far are kept: another request needs the memory" in text


class Crowd(PolicyMachine):
    """Two workers, and more than they hold: the machine's auditor hears of all that happens."""

    policy, instant = "mell-plus", False

    def __init__(self) -> None:
        super().__init__()
        cluster = ClusterSettings(priorities=Priorities(age_s=20.0, hole_s=0.0))
        self.start(2, 1000, cluster, (None, None))

    def end(self, name: str) -> None:
        """End the request, and its move with it."""
        self.books.forget(name)
        self.tell(e.RequestFinished(self.now_s, RequestId(name)))

    def running(self) -> list[str]:
        """Return the requests that have a worker."""
        return [name for name, worker in self.books.at.items() if worker]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1, 2]), st.integers(200, 1400), st.booleans()), min_size=8))
def test_under_any_load_nothing_is_lost_and_nobody_starves(steps: list[tuple[int, int, bool]]) -> None:
    """All of the auditor's laws hold, and as others end every request is placed, as often as it was suspended."""
    crowd = Crowd()
    for number, (priority, kv_bytes, one_ends) in enumerate([(1, 1100, False)] * 4 + steps):
        crowd.arrive([kv_bytes], priority, "", "")
        crowd.epoch(5.0 if number % 2 else 0.1, 0)
        crowd.the_books_agree()
        if one_ends and (running := crowd.running()):
            crowd.end(running[0])
    while crowd.books.size:
        running = crowd.running()
        assert running, "they wait for nobody"
        crowd.end(running[0])
        crowd.epoch(5.0, 0)
        crowd.the_books_agree()
