"""The boundaries of links and of foreign prefill: defaults at first, then learned from measurements."""

import pytest

from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries, Prefill, Segment
from melld.scheduler.steptimes import StepCosts

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
NETWORK = Segment(name="network", pairs=frozenset({(W0, W1), (W1, W0)}))
ASSUMED = Boundaries.assumed(0.1, 0.25, None, (NETWORK,))


def test_longer_epochs_carry_more() -> None:
    """All figures are for one length of the epoch."""
    longer = Boundaries.assumed(0.5, 0.25, None, ())
    assert longer.link_bytes(W0, W1) == 5 * ASSUMED.link_bytes(W0, W1)
    assert longer.in_bytes(W0) == longer.out_bytes(W0) == longer.link_bytes(W0, W1)
    assert [longer.prefill_tokens(W0, batch) for batch in (0, 1)] == [10_240, 2_560]


def test_a_link_carries_what_its_trial_did() -> None:
    """Until it is open it has the default: a worker that joins later can be used at once."""
    found = ASSUMED.learned({(W0, W1): 2e9}, {})
    assert found.link_bytes(W0, W1) == 200_000_000
    assert found.link_bytes(W1, W0) == ASSUMED.link_bytes(W1, W0)


def test_no_link_carries_more_than_the_operator_allows() -> None:
    """Tried or not."""
    limited = Boundaries.assumed(0.1, 0.25, 1e6, ()).learned({(W0, W1): 2e9, (W1, W0): 5e5}, {})
    links = [limited.link_bytes(*ends) for ends in ((W0, W1), (W1, W0), (W0, W2))]
    assert links == [100_000, 50_000, 100_000]


def test_steps_beside_moves_grow_only_by_the_share() -> None:
    """Of each fifth of a second 0.04 s are for moves, and 0.16 s for those that decode, however many they are."""
    found = ASSUMED.learned({}, {W0: StepCosts(0.01, 0.001, 1e-4)})
    assert [found.prefill_tokens(W0, batch) for batch in (0, 1, 16)] == [1000, 200, 200]
    assert found.prefill_tokens(W1, 1) == ASSUMED.prefill_tokens(W1, 1)


def test_costs_without_prompts_leave_the_default() -> None:
    """As of a worker that has only decoded yet."""
    assert ASSUMED.learned({}, {W0: StepCosts(0.01, 0.001, 0.0)}).prefill == {}


@pytest.mark.parametrize(("tokens", "batch"), [(Prefill(0, 0), 0), (Prefill(0, 0), 3)])
def test_a_worker_s_prefill_boundary_is_never_zero(tokens: Prefill, batch: int) -> None:
    """A move by tokens would wait indefinitely."""
    assert Boundaries(prefill={W0: tokens}).prefill_tokens(W0, batch) == 1


def test_a_shared_segment_carries_as_much_as_its_fastest_link() -> None:
    """Four copies at once do not begin at four times what the memory between CPU workers carries."""
    found = ASSUMED.learned({(W0, W1): 1e9, (W1, W0): 3e9, (W0, W2): 9e9}, {})
    assert found.segments_of(W0, W1) == [NETWORK]
    assert found.segment_bytes("network") == 300_000_000
    assert ASSUMED.segment_bytes("network") == ASSUMED.link_bytes(W0, W1)


def test_machines_that_join_bring_their_own_segments() -> None:
    """Beside those that were there at the start."""
    later = Segment(name="later", pairs=frozenset({(W0, W2)}))
    found = ASSUMED.learned({}, {}, (later,))
    assert [one.name for one in (*found.segments_of(W0, W1), *found.segments_of(W0, W2))] == ["network", "later"]


def test_the_status_shows_measurements() -> None:
    """And says so while there are none."""
    assert "defaults" in ASSUMED.in_words()
    told = ASSUMED.learned({(W0, W1): 2**30, (W1, W0): 2**31}, {W0: StepCosts(0.01, 0.001, 1e-4)}).in_words()
    assert told == "links 1.00 to 2.00 GiB/s; prefill for moves in 100 ms: 1,000 tokens idle, 200 beside a request"
