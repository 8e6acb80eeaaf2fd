"""The waiting queue."""

from hypothesis import example, given
from hypothesis import strategies as st

from melld.scheduler.priorities import Priorities, class_of
from melld.scheduler.state import Request
from melld.scheduler.waiting import WaitingQueue

STEPS = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(-1, 1), st.integers(0, 30)), max_size=60)


def waiting(
    queue: WaitingQueue, name: str, sequence: int, client: str = "", priority: int = 0, size: int = 1
) -> Request:
    """Add one more waiting request."""
    request = Request(name, size, priority, sequence)
    request.client = client
    queue.add(request)
    return request


def order(queue: WaitingQueue, requests: dict[str, Request]) -> list[str]:
    """Give each request room, one after the other; return them in that order."""
    served = []
    while (name := queue.head(0.0)) is not None:
        queue.begin(requests[name])
        served.append(name)
    return served


@given(STEPS)
def test_the_head_is_always_the_first_in_order(steps: list[tuple[bool, bool, int, int]]) -> None:
    """However requests come and give up: class, then displaced, then arrival."""
    queue = WaitingQueue()
    expected: dict[str, tuple[int, bool, int]] = {}
    requests = {}
    for number, (come, displaced, priority, victim) in enumerate(steps):
        if come or not expected:
            request = requests[f"r{number}"] = Request(f"r{number}", 1, priority, number)
            queue.add(request, displaced)
            expected[request.id] = (priority, not displaced, number)
        else:
            name = sorted(expected)[victim % len(expected)]
            queue.remove(name)
            del expected[name]
        ranked = sorted(expected, key=expected.__getitem__)
        assert (ranked[0] if ranked else None) == queue.head(0.0)
        assert len(ranked) == len(queue)
        assert {one.id for one in queue} == {name for name, rank in expected.items() if rank[1]}
    assert order(queue, requests) == ranked if steps else True


def test_a_request_that_is_passed_over_keeps_its_place() -> None:
    """Passing over is for one round of serving only."""
    queue = WaitingQueue()
    displaced = Request("lost", 1, 0, 9)
    requests = {name: waiting(queue, name, number) for number, name in enumerate("abc")} | {"lost": displaced}
    queue.add(displaced, displaced=True)
    for name in ("lost", "a", "b"):
        queue.pass_over(name)
    assert queue.head(0.0) == "c"
    queue.restore()
    assert len(queue) == 4
    assert order(queue, requests) == ["lost", "a", "b", "c"]


ARRIVALS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 50), st.sampled_from([0, 0, 1])), min_size=1, max_size=80
)


@given(ARRIVALS)
def test_one_client_s_requests_go_by_priority_then_arrival(arrivals: list[tuple[str, int, int]]) -> None:
    """Fairness among clients never reverses one client's own order, and priority goes before fairness."""
    queue = WaitingQueue()
    requests = {
        f"r{number}": waiting(queue, f"r{number}", number, client, priority, size)
        for number, (client, size, priority) in enumerate(arrivals)
    }
    served = [requests[name] for name in order(queue, requests)]
    assert len(served) == len(arrivals)
    assert [request.priority for request in served] == sorted(request.priority for request in served)
    for client in "abcd":
        own = [(request.priority, request.sequence) for request in served if request.client == client]
        assert own == sorted(own)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.data())
def test_of_two_waiting_clients_neither_is_more_than_a_request_ahead(sizes: list[int], data: st.DataObject) -> None:
    """A client with a thousand requests in the queue gets no more of the machine than one with a few."""
    queue = WaitingQueue()
    names = [f"{client}{number}" for number in range(len(sizes)) for client in "ab"]
    requests = {
        name: waiting(queue, name, sequence, name[0], size=data.draw(st.integers(1, 50)))
        for sequence, name in enumerate(data.draw(st.permutations(names)))
    }
    had = {"a": 0, "b": 0}
    left = {"a": len(sizes), "b": len(sizes)}
    for name in order(queue, requests):
        client = name[0]
        had[client] += requests[name].kv_bytes
        left[client] -= 1
        if all(left.values()):
            assert abs(had["a"] - had["b"]) <= 50


@given(st.integers(1, 200), st.integers(0, 30))
def test_a_newcomer_waits_for_at_most_one_request_of_each_client(before: int, already_served: int) -> None:
    """It is not behind somebody else's long queue, and a long-served client owes no more than its share."""
    queue = WaitingQueue()
    requests = {f"a{number}": waiting(queue, f"a{number}", number, "a", size=10) for number in range(before)}
    for _ in range(min(already_served, before)):
        queue.begin(requests[str(queue.head(0.0))])
    requests["b"] = waiting(queue, "b", 1000, "b", size=10)
    assert "b" in order(queue, requests)[:2]


def test_an_absent_client_accumulates_no_credit() -> None:
    """A night alone on the machine is not held against anybody in the morning."""
    queue = WaitingQueue()
    for number in range(100):
        alone = Request(f"night{number}", 1000, 0, number)
        alone.client = "a"
        queue.begin(alone)
        queue.share.grow("a", 500)
    requests = {}
    for number in range(20):
        for sequence, client in enumerate("ab"):
            name = f"{client}{number}"
            requests[name] = waiting(queue, name, 200 + 2 * number + sequence, client, size=1000)
    served = order(queue, requests)
    assert sum(name[0] == "a" for name in served[:10]) >= 4


def test_growth_counts_as_service() -> None:
    """Long answers are charged like long prompts."""
    queue = WaitingQueue()
    requests = {
        f"{c}{n}": waiting(queue, f"{c}{n}", 10 * n + i, c, size=10) for n in range(3) for i, c in enumerate("ab")
    }
    queue.begin(requests["a0"])
    queue.share.grow("a", 25)
    assert order(queue, requests) == ["b0", "b1", "b2", "a1", "a2"]


def test_an_immediately_served_client_accumulates_no_credit_either() -> None:
    """Room for a small request of an absent client does not bring it ahead of those in the queue."""
    queue = WaitingQueue()
    for number in range(2):
        queue.begin(Request(f"a{number}", 100, 0, number, client="a"))
    waiting(queue, "a2", 2, "a", size=100)
    queue.begin(Request("b", 10, 0, 3, client="b"))
    assert (queue.share.served_bytes("a"), queue.share.served_bytes("b")) == (200, 110)


def test_the_greediest_client_s_last_request_is_shed() -> None:
    """The client with the most in the queue makes room for the others; the least urgent go first of all."""
    queue = WaitingQueue()
    for number in range(4):
        waiting(queue, f"a{number}", number, "a")
    waiting(queue, "b0", 4, "b")
    assert queue.last(0.0).id == "a3"
    waiting(queue, "c0", 5, "c", priority=1)
    assert queue.last(0.0).id == "c0"


@given(ARRIVALS, st.sampled_from("abcde"), st.sampled_from([0, 1, 2]))
def test_the_victim_is_known_before_the_newcomer_is_added(
    arrivals: list[tuple[str, int, int]], client: str, priority: int
) -> None:
    """A request that would be shed at once is refused before anything is done for it, and no other is."""
    queue = WaitingQueue()
    for number, (other, size, theirs) in enumerate(arrivals):
        waiting(queue, f"r{number}", number, other, theirs, size)
    expected = queue.would_be_last(client, priority, 0.0)
    newcomer = waiting(queue, "newcomer", len(arrivals), client, priority)
    assert expected == (queue.last(0.0) is newcomer)


def test_with_equally_greedy_clients_the_newcomer_is_shed() -> None:
    """No waiting request is shed for a client that has as many in the queue."""
    queue = WaitingQueue()
    for number, name in enumerate(("a0", "b0", "b1", "a1")):
        waiting(queue, name, number, name[0])
    assert queue.last(0.0).id == "a1"


AGE_S = 10.0
WAITS = st.lists(
    st.tuples(st.integers(0, 15), st.sampled_from([-7, -1, 0, 1, 9]), st.booleans(), st.integers(0, 2)),
    min_size=1,
    max_size=60,
)


@given(WAITS)
def test_nobody_starves(waits: list[tuple[int, int, bool, int]]) -> None:
    """No request is passed by another priority's requests that all came much later."""
    queue = WaitingQueue(Priorities(age_s=AGE_S))
    requests: dict[str, Request] = {}
    now_s = 0.0
    for number, (later_s, priority, displaced, served) in enumerate(waits):
        now_s += later_s
        request = requests[f"r{number}"] = Request(f"r{number}", 1, priority, number, now_s)
        queue.add(request, displaced and not number % 3)
        for _ in range(served):
            if (name := queue.head(now_s)) is not None:
                queue.begin(first := requests[name])
                oldest_s = min(one.arrived_s for one in requests.values() if one.priority == first.priority)
                del requests[name]
                for other in requests.values():
                    between = class_of(other.priority) - class_of(first.priority) + 1
                    if other.priority != first.priority:
                        assert oldest_s <= other.arrived_s + between * AGE_S


def test_ageing_lifts_a_low_request_to_normal_and_then_to_high() -> None:
    """One class at a time; among equally urgent ones the priority then decides."""
    queue = WaitingQueue(Priorities(age_s=60.0))
    for number, (name, priority, at_s) in enumerate([("low", 5, 0.0), ("normal", 0, 50.0), ("high", -1, 100.0)]):
        queue.add(Request(name, 1, priority, number, at_s))
    assert [queue.head(at_s) for at_s in (100.0, 109.9, 110.0)] == ["high", "high", "high"]
    queue.remove("high")
    assert [queue.head(at_s) for at_s in (110.0, 119.0, 120.0)] == ["normal"] * 3
    queue.remove("normal")
    queue.add(Request("high", 1, -1, 3, 170.0))
    assert [queue.head(at_s) for at_s in (170.0, 179.9, 180.0)] == ["high", "high", "low"]


OLD_BY_ANOTHER = [(0, 0, False, 0), (0, -7, False, 0), (0, 0, False, 0), (int(2 * AGE_S), -7, False, 0)]
"""The other client has waited with more of priority 0, but they are old."""


@given(WAITS, st.sampled_from(["", "a"]), st.sampled_from([-1, 0, 1, 2]))
@example(OLD_BY_ANOTHER, "a", 0)
def test_the_least_urgent_is_shed_and_known_before(
    waits: list[tuple[int, int, bool, int]], client: str, priority: int
) -> None:
    """By the aged class; never while another is less urgent and newer."""
    queue = WaitingQueue(Priorities(age_s=AGE_S))
    now_s = 0.0
    for number, (later_s, theirs, _, _) in enumerate(waits):
        now_s += later_s
        queue.add(Request(f"r{number}", 1, theirs, number, now_s, client="a" * (number % 2)))
    expected = queue.would_be_last(client, priority, now_s)
    newcomer = Request("newcomer", 1, priority, len(waits), now_s, client=client)
    queue.add(newcomer)
    last = queue.last(now_s)
    assert expected == (last is newcomer)
    newest = {request.priority: request for request in queue if request.client == last.client}
    assert not any(request.priority > last.priority and request.sequence > last.sequence for request in newest.values())


def test_with_one_priority_age_changes_nothing() -> None:
    """A client with a long queue does not go first because its requests have waited: shares stay fair."""
    queue = WaitingQueue(Priorities(age_s=1.0))
    requests = {name: waiting(queue, name, number, name[0]) for number, name in enumerate(("a0", "a1", "a2"))}
    queue.begin(requests["a0"])
    requests["b"] = Request("b", 1, 0, 9, 1000.0, client="b")
    queue.add(requests["b"])
    assert queue.head(1000.0) == "b"
