"""What a client may have compiled again without queuing for a judge."""

from melld.engine.frontend.allowance import Allowance


def test_known_but_expensive_constraints_queue_again() -> None:
    """A client cannot fill a worker's queue with constraints that were good before; cheap ones are never held up."""
    allowance = Allowance(2.0)
    assert [allowance.spend("a", 0.9, 0.0) for _ in range(4)] == [True, True, False, False]
    assert allowance.spend("b", 0.9, 0.0)
    assert all(allowance.spend("a", 0.004, 0.0) for _ in range(1000))
    assert allowance.spend("a", 0.9, 4.0)
