"""The facts that travel, and the plan of what is still to be copied."""

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from melld.migrate.snapshot import CopyPlan, MoveRefusal, MoveRefused, RequestSnapshot, Reservation


def reservation(*groups: tuple[int, ...], reused: int = 0) -> Reservation:
    return Reservation(block_ids=groups, reused_blocks=(reused,) * len(groups))


def test_a_snapshot_survives_its_encoding() -> None:
    """One process reads exactly what another wrote."""
    snapshot = RequestSnapshot(
        request="r",
        output_token_ids=[5, 6],
        num_prompt_tokens=3,
        num_computed_tokens=4,
        block_ids=((7,),),
        block_epoch=1,
        num_preemptions=1,
        priority=-1000,
        generator_state=b"\x00\xff",
        prefill_stats=(1, 2, 3, 4, 5, 6),
        events=((1, 0.5),),
        engine="e",
    )
    assert snapshot == msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=RequestSnapshot)
    assert snapshot.num_tokens == 5


@given(st.integers(0, 12), st.lists(st.integers(0, 6), max_size=5))
def test_rounds_copy_each_block_once(reused: int, growth: list[int]) -> None:
    """However a request grows during the copy, every missing block arrives, and arrives once."""
    source = tuple(range(100, 150))
    room = reservation(tuple(range(1, 51)), reused=reused)
    plan = CopyPlan(room)
    arrived: dict[int, int] = {}
    full = 0
    for more in [*growth, 1]:
        full += more
        blocks, into, places = plan.missing((source[:full],), 0, room)
        assert not set(into) & set(arrived)
        arrived |= dict(zip(into, blocks, strict=True))
        plan.copied(places, 0)
    assert arrived == {place + 1: source[place] for place in range(reused, full)}


def test_a_preemption_at_the_source_voids_what_was_copied() -> None:
    """Blocks that were freed and allocated again hold other bytes under the same ids."""
    room = reservation((1, 2, 3))
    plan = CopyPlan(room)
    _, into, places = plan.missing(((11, 12),), 0, room)
    plan.copied(places, 0)
    assert plan.missing(((11, 12, 13),), 0, room)[0] == [13]
    assert plan.missing(((11, 12, 13),), 1, room)[0] == [11, 12, 13]
    plan.copied(places, 0)  # a copy of the old blocks that ended late
    assert plan.missing(((11, 12, 13),), 1, room)[0] == [11, 12, 13]
    assert into == [1, 2]


def test_blocks_behind_a_window_are_not_copied() -> None:
    """On either side: the source has dropped them since, or the destination never had room for them."""
    room = reservation((0, 0, 3, 4))
    blocks, into, _ = CopyPlan(room).missing(((0, 12, 0, 14),), 0, room)
    assert (blocks, into) == ([14], [4])


def test_groups_of_blocks_are_copied_together() -> None:
    """A model with several kinds of layers has several block tables; one pull serves them all."""
    room = reservation((1, 2), (3, 4))
    blocks, into, _ = CopyPlan(room).missing(((11, 12), (13,)), 0, room)
    assert (blocks, into) == ([11, 12, 13], [1, 2, 3])


def test_each_group_has_its_own_blocks_that_need_no_copy() -> None:
    """With unequal block sizes, a cached prefix is another number of them; a state is always copied."""
    room = Reservation(((1, 2, 3, 4), (5, 6), (7,)), (2, 1, 0))
    blocks, into, _ = CopyPlan(room).missing(((11, 12, 13, 14), (15, 16), (17,)), 0, room)
    assert (blocks, into) == ([13, 14, 16, 17], [3, 4, 6, 7])


def test_a_refusal_names_the_request_and_the_response_s_status() -> None:
    """An operator who requested the move reads which request cannot move, and why."""
    error = MoveRefused("r", MoveRefusal.POOLING)
    assert (str(error), error.status) == ("request r cannot be moved: it is an embedding or scoring request", 409)
