"""The way that a move would take, and whether it can wait."""

import pytest

from melld.ids import RequestId
from melld.migrate.planner import Deferred, Planner
from melld.migrate.snapshot import Via
from tests.migrate.test_planner import BUSY, COMPUTE, IDLE_COMPUTE, LIMITS, LINK, TOKENS, wanted


@pytest.mark.parametrize(
    ("kv_bytes", "tokens", "way"),
    [(2 * LINK, IDLE_COMPUTE, Via.TOKENS), (LINK, 2 * IDLE_COMPUTE, Via.KV), (LINK, IDLE_COMPUTE, Via.KV)],
)
def test_the_first_way_is_the_one_that_is_over_sooner(kv_bytes: int, tokens: int, way: Via) -> None:
    """What `melld migrate` shows before the move has begun."""
    planner = Planner(LIMITS)
    assert planner.first_way(wanted("a", kv_bytes, tokens)) is way


def test_a_move_without_a_way_is_shown_as_one_by_kv() -> None:
    """Its destination is not ready yet; what waits has a way of its own where it has any."""
    assert Planner(LIMITS).first_way(wanted("a", ways=())) is Via.KV
    assert Planner(LIMITS).first_way(wanted("a", ways=TOKENS)) is Via.TOKENS


def test_a_source_that_overflows_within_two_epochs_cannot_wait() -> None:
    """Also at the very end of the second; nor can a move that has lost its patience, or that somebody asked for."""
    planner = Planner(LIMITS)
    edge_s = planner.settings.pressing * LIMITS.epoch_s
    for move, pressing in ((wanted("a", urgency_s=edge_s), True), (wanted("a", urgency_s=edge_s * 1.01), False)):
        assert planner.is_pressing(Deferred(move, 0.0)) is pressing
    waited = [planner.is_pressing(Deferred(wanted("a"), 0.0, epochs=planner.settings.patience - n)) for n in (0, 1)]
    assert waited == [True, False]
    assert planner.is_pressing(Deferred(wanted("a", asked=True), 0.0))


def test_what_waits_is_known_with_the_time_since_when() -> None:
    """`melld status` shows how long each has waited; asking again begins anew, at the end of the queue."""
    planner = Planner(LIMITS)
    planner.ask(wanted("a"), 3.0)
    planner.ask(wanted("b"), 4.0)
    planner.ask(wanted("a", 7), 5.0)
    assert [(d.wanted.request, d.wanted.kv_bytes, d.since_s) for d in planner.waiting.values()] == [
        ("b", 10, 4.0),
        ("a", 7, 5.0),
    ]


def test_a_move_that_was_dropped_never_begins() -> None:
    """Dropped twice is dropped once; nobody counts the workers before the first epoch."""
    planner = Planner(LIMITS)
    planner.ask(wanted("a", COMPUTE), 0.0)
    dropped = planner.drop(RequestId("a"))
    assert dropped is not None
    assert dropped.wanted.request == "a"
    assert planner.drop(RequestId("a")) is None
    assert planner.epoch(BUSY).starts == ()
