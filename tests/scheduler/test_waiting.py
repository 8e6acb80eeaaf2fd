"""Promises of the waiting queue."""

from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.state import Request
from melld.scheduler.waiting import WaitingQueue

STEPS = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(-1, 1), st.integers(0, 30)), max_size=60)


@given(STEPS)
def test_the_head_is_always_the_first_of_those_that_wait(steps: list[tuple[bool, bool, int, int]]) -> None:
    """However requests come and give up, the order is displaced, priority, first come."""
    queue = WaitingQueue()
    expected: dict[str, tuple[bool, int, int]] = {}
    for number, (come, displaced, priority, victim) in enumerate(steps):
        if come or not expected:
            request = Request(f"r{number}", 1, 1, priority, number)
            queue.add(request, displaced)
            expected[request.id] = (not displaced, priority, number)
        else:
            name = sorted(expected)[victim % len(expected)]
            queue.remove(name)
            del expected[name]
        ranked = sorted(expected, key=expected.__getitem__)
        assert ranked == list(queue)
        assert (ranked[0] if ranked else None) == queue.head()


def test_who_is_passed_over_keeps_the_place() -> None:
    """Passing over is for one round of serving only."""
    queue = WaitingQueue()
    for number, name in enumerate(("a", "b")):
        queue.add(Request(name, 1, 1, 0, number))
    queue.pass_over("a")
    assert queue.head() == "b"
    queue.restore("a")
    assert queue.head() == "a"
    assert len(queue) == 2
