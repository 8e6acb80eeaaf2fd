"""Suspects of a worker's death are retried one at a time, so that a poison request fails alone."""

from melld.engine.fleet.probation import Probation
from melld.ids import RequestId, WorkerId

A, B, C = (RequestId(name) for name in "abc")
W0, W1 = WorkerId("w0"), WorkerId("w1")


def test_one_suspect_at_a_time_is_retried() -> None:
    """Whoever kills the next worker is identified."""
    probation = Probation()
    assert [probation.give(name, W0) for name in (A, B, C)] == [True, False, False]
    assert probation.leave(A) == B
    assert probation.leave(B) == C
    assert probation.leave(C) is None


def test_each_worker_has_its_own_queue_of_suspects() -> None:
    """One worker's suspects do not hold up another's."""
    probation = Probation()
    assert probation.give(A, W0)
    assert probation.give(B, W1)


def test_leaving_the_queue_early_releases_nobody() -> None:
    """A client that goes away does not put two suspects on trial."""
    probation = Probation()
    for name in (A, B, C):
        probation.give(name, W0)
    assert probation.leave(B) is None
    assert probation.leave(A) == C


def test_requests_that_were_queued_when_the_worker_died_are_innocent() -> None:
    """They were not running there: their count of deaths does not rise."""
    probation = Probation()
    for name in (A, B, C):
        probation.give(name, W0)
    assert probation.worker_lost(W0) == {B, C}
    assert probation.give(A, W1)


def test_an_unsuspected_request_changes_nothing() -> None:
    """It ends without advancing anybody's turn."""
    assert Probation().leave(A) is None
    assert Probation().worker_lost(W0) == frozenset()
