"""The boundaries of links and of foreign prefill, as they are looked up."""

import msgspec
import pytest

from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
MEASURED = Boundaries(
    epoch_s=0.1,
    links={W0: {W1: 1000}},
    prefill={W0: ((0, 800), (1, 100), (5, 60), (16, 0))},
    other_link_bytes=7,
    other_prefill=((0, 40), (1, 4)),
)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [(0, 800), (1, 100), (2, 90), (5, 60), (16, 1), (300, 1)],
)
def test_foreign_prefill_follows_the_table_between_its_points(batch: int, tokens: int) -> None:
    """A busy worker prefills less, but never nothing: a move by tokens would wait indefinitely."""
    assert MEASURED.prefill_tokens(W0, batch) == tokens


def test_one_request_is_not_half_way_to_none() -> None:
    """Beside nobody a worker may prefill all the time; that says nothing about a worker with one request."""
    sparse = Boundaries(prefill={W0: ((0, 8000), (4, 10))})
    assert [sparse.prefill_tokens(W0, batch) for batch in (0, 1, 3, 4, 5)] == [8000, 10, 10, 10, 10]


def test_what_was_not_measured_has_the_default() -> None:
    """A worker that joins later, or a link that was not tried, can be used all the same."""
    assert (MEASURED.link_bytes(W0, W1), MEASURED.link_bytes(W1, W0)) == (1000, 7)
    assert (MEASURED.prefill_tokens(W2, 0), MEASURED.prefill_tokens(W2, 9)) == (40, 4)


def test_longer_epochs_carry_more() -> None:
    """Figures that were measured for one length of the epoch serve a daemon with another."""
    longer = MEASURED.for_epochs_of(0.5)
    assert (longer.epoch_s, longer.link_bytes(W0, W1), longer.prefill_tokens(W0, 5)) == (0.5, 5000, 300)
    assert longer.for_epochs_of(0.1) == MEASURED


def test_they_survive_a_file() -> None:
    """The next daemon uses what `melld profile` has saved."""
    assert msgspec.json.decode(msgspec.json.encode(MEASURED), type=Boundaries) == MEASURED


@pytest.mark.parametrize("table", [(), ((1, 5),), ((0, 5), (4, 2), (2, 3))])
def test_a_table_that_cannot_be_read_is_refused(table: tuple[tuple[int, int], ...]) -> None:
    """A damaged file must not become a daemon that never moves anything."""
    with pytest.raises(ValueError, match="begins with batch 0"):
        Boundaries(prefill={W0: table})
