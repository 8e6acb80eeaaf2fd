"""Suspects of a worker's death are tried one at a time, so that a poison request fails alone."""

from melld.engine.fleet.delivery import Probation
from melld.ids import RequestId, WorkerId

A, B, C = (RequestId(name) for name in "abc")
W0, W1 = WorkerId("w0"), WorkerId("w1")


def test_one_suspect_at_a_time_goes_on() -> None:
    """Whoever kills the next worker is known by name."""
    probation = Probation()
    assert [probation.give(name, W0) for name in (A, B, C)] == [True, False, False]
    assert probation.leave(A) == B
    assert probation.leave(B) == C
    assert probation.leave(C) is None


def test_workers_have_lines_of_their_own() -> None:
    """One worker's suspects do not hold up another's."""
    probation = Probation()
    assert probation.give(A, W0)
    assert probation.give(B, W1)


def test_who_leaves_the_line_before_its_turn_lets_nobody_go_on() -> None:
    """A client that goes away does not put two suspects on trial."""
    probation = Probation()
    for name in (A, B, C):
        probation.give(name, W0)
    assert probation.leave(B) is None
    assert probation.leave(A) == C


def test_those_who_waited_when_the_worker_died_are_innocent() -> None:
    """They were not there: their count of deaths does not rise."""
    probation = Probation()
    for name in (A, B, C):
        probation.give(name, W0)
    assert probation.worker_lost(W0) == {B, C}
    assert probation.give(A, W1)


def test_a_stranger_changes_nothing() -> None:
    """Requests that were never suspected end without anybody's turn coming."""
    assert Probation().leave(A) is None
    assert Probation().worker_lost(W0) == frozenset()
