"""Each bin holds what was measured of its own link, port, segment or worker."""

import pytest

from melld.ids import WorkerId
from melld.migrate import paths
from melld.migrate.boundaries import Boundaries, Prefill, Segment
from melld.migrate.packing import Bin
from melld.migrate.snapshot import Via

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
MEASURED = Boundaries(
    links={W0: {W1: 30, W2: 90}},
    segments=(
        Segment(name="bridge", nbytes=70, pairs=frozenset({(W0, W1)})),
        Segment(name="memory", nbytes=0, pairs=frozenset({(W1, W0)})),
    ),
    prefill={W1: Prefill(60, 9)},
    other_link_bytes=1000,
    other_port_bytes=2000,
)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ((Via.KV, W0, W1), 30),
        ((Via.KV, W0, W2), 90),
        ((Via.KV, W1, W0), 1000),
        (("out", W0), 90),  # its fastest link
        (("out", W1), 2000),  # no link of it was measured
        (("in", W1), 30),
        (("in", W2), 90),  # its fastest link
        (("in", W0), 2000),
        (("shared", "bridge"), 70),
        (("shared", "memory"), 1),  # never nothing, or a move would wait for ever
        (("shared", "a switch that is gone"), 1),
        ((Via.TOKENS, W1), 9),
        ((Via.TOKENS, W2), 2048),
    ],
)
def test_a_bin_holds_what_was_measured_of_it(name: Bin, holds: int) -> None:
    """A slow link is not filled as if it were the fast one beside it."""
    assert paths.boundary(name, MEASURED, {W1: 1}) == holds


def test_a_copy_uses_its_link_both_ports_and_its_pair_s_segments() -> None:
    """And nothing that other pairs share."""
    kv = (Via.KV, W0, W1), ("out", W0), ("in", W1), ("shared", "bridge")
    assert paths.path(MEASURED, W0, W1) == kv
    assert paths.compute(W1) == ((Via.TOKENS, W1),)


def test_a_port_is_as_fast_as_its_fastest_link() -> None:
    """What one link can carry has left its worker."""
    links = Boundaries(links={W0: {W1: 30, W2: 90}, W1: {W2: 40}})
    assert [links.out_bytes(worker) for worker in (W0, W1)] == [90, 40]
    assert [links.in_bytes(worker) for worker in (W1, W2)] == [30, 90]
    none = Boundaries(links={W0: {W0: 0}})
    assert (none.out_bytes(W0), none.in_bytes(W0), none.link_bytes(W0, W0)) == (1, 1, 1)
