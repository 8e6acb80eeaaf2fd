"""The way that a move would take, and whether it can wait."""

import pytest

from melld.ids import RequestId
from melld.migrate.planner import Planner
from melld.migrate.snapshot import Via
from tests.migrate.test_planner import BUSY, COMPUTE, IDLE_COMPUTE, LIMITS, LINK, TOKENS, wanted


@pytest.mark.parametrize(
    ("kv_bytes", "tokens", "way"),
    [(2 * LINK, IDLE_COMPUTE, Via.TOKENS), (LINK, 2 * IDLE_COMPUTE, Via.KV), (LINK, IDLE_COMPUTE, Via.KV)],
)
def test_the_first_way_is_the_faster_one(kv_bytes: int, tokens: int, way: Via) -> None:
    """What `melld migrate` shows before the move has begun."""
    planner = Planner(LIMITS)
    assert planner.first_way(wanted("a", kv_bytes, tokens)) is way


def test_a_move_without_a_way_is_shown_as_one_by_kv() -> None:
    """Its destination is not ready yet; a waiting move shows its own way where it has one."""
    assert Planner(LIMITS).first_way(wanted("a", ways=())) is Via.KV
    assert Planner(LIMITS).first_way(wanted("a", ways=TOKENS)) is Via.TOKENS


def test_a_move_cannot_wait_if_its_source_overflows_within_two_epochs() -> None:
    """Even at the very end of the second; nor can one that is out of patience, or requested by somebody."""
    planner = Planner(LIMITS)
    edge_s = planner.settings.pressing * LIMITS.epoch_s
    for move, pressing in ((wanted("a", urgency_s=edge_s), True), (wanted("a", urgency_s=edge_s * 1.01), False)):
        assert planner.is_pressing(move) is pressing
    waited = [planner.is_pressing(wanted("a", epochs=planner.settings.patience - n)) for n in (0, 1)]
    assert waited == [True, False]
    assert planner.is_pressing(wanted("a", asked=True))


def test_a_waiting_move_shows_since_when() -> None:
    """`melld status` shows how long each has waited; asking again restarts at the end of the queue."""
    planner = Planner(LIMITS)
    planner.ask(wanted("a"), 3.0)
    planner.ask(wanted("b"), 4.0)
    planner.ask(wanted("a", 7), 5.0)
    assert [(d.request, d.kv_bytes, d.since_s) for d in planner.waiting.values()] == [
        ("b", 10, 4.0),
        ("a", 7, 5.0),
    ]


def test_a_dropped_move_never_begins() -> None:
    """Dropping twice is dropping once; nobody counts the workers before the first epoch."""
    planner = Planner(LIMITS)
    planner.ask(wanted("a", COMPUTE), 0.0)
    dropped = planner.drop(RequestId("a"))
    assert dropped is not None
    assert dropped.request == "a"
    assert planner.drop(RequestId("a")) is None
    assert planner.epoch(BUSY).starts == ()
