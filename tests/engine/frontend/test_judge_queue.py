"""Who is judged next: whatever clients send, each has its turn."""

from hypothesis import given
from hypothesis import strategies as st

from melld.engine.frontend.judge_queue import Allowance, JudgeQueue


def queue_of(*items: tuple[str, int]) -> JudgeQueue[int]:
    queue: JudgeQueue[int] = JudgeQueue()
    for client, item in items:
        queue.add(client, item)
    return queue


def test_one_clients_heap_does_not_keep_another_waiting() -> None:
    """A client that sends one constraint is next but one, however many another has sent before."""
    queue = queue_of(*(("many", item) for item in range(100)), ("one", 100))
    assert queue.take() == ("many", 0)
    assert queue.take() == ("one", 100)


def test_a_client_has_one_constraint_at_a_judge() -> None:
    """The other judge is left to others."""
    queue = queue_of(("a", 1), ("a", 2))
    assert queue.take() == ("a", 1)
    assert queue.ready == 0
    assert queue.take() is None
    queue.done("a")
    assert queue.take() == ("a", 2)


def test_who_has_left_waits_no_more() -> None:
    """What nobody wants is not compiled, and takes no turn."""
    queue = queue_of(("a", 1), ("a", 2), ("b", 3))
    queue.remove("a", 1)
    queue.remove("a", 1)
    assert [queue.take(), queue.take(), queue.take()] == [("a", 2), ("b", 3), None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), unique=True))
def test_each_is_taken_once_and_in_its_clients_order(items: list[tuple[str, int]]) -> None:
    """Nothing is lost, and nobody overtakes the same client's earlier constraint."""
    queue = queue_of(*items)
    taken = []
    while (one := queue.take()) is not None:
        taken.append(one)
        queue.done(one[0])
    assert sorted(taken) == sorted(items)
    for client in "abc":
        assert [one for one in taken if one[0] == client] == [one for one in items if one[0] == client]


def test_known_constraints_that_are_dear_take_turns_again() -> None:
    """A client cannot fill a worker's queue with constraints that were good before; cheap ones are never held up."""
    allowance = Allowance(2.0)
    assert [allowance.spend("a", 0.9, 0.0) for _ in range(4)] == [True, True, False, False]
    assert allowance.spend("b", 0.9, 0.0)
    assert all(allowance.spend("a", 0.004, 0.0) for _ in range(1000))
    assert allowance.spend("a", 0.9, 4.0)
