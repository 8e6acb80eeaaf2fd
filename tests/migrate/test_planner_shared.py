"""Global consensus: moves over links that share a port, a switch or a memory are planned together."""

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from melld.ids import RequestId, WorkerId
from melld.migrate import paths
from melld.migrate.boundaries import Boundaries, Pair, Prefill, Segment
from melld.migrate.planner import Planner
from melld.migrate.snapshot import Via
from melld.migrate.wish import Cause, Wish
from tests.effort import examples

LINK, COMPUTE = 100, 20
GPUS = [WorkerId(f"gpu{number}") for number in range(1, 5)]
KV, BOTH = (Via.KV,), (Via.KV, Via.TOKENS)
BUSY = dict.fromkeys(GPUS, 8)


def pairs(sources: list[WorkerId], destinations: list[WorkerId]) -> frozenset[Pair]:
    return frozenset((one, other) for one in sources for other in destinations if one != other)


SWITCH = Segment(name="switch", nbytes=LINK, pairs=pairs(GPUS[:2], GPUS[2:]))
"""Figure 9 of the paper: GPU 1 and GPU 2 reach GPU 4 through the same switch."""
FIGURE_9 = Boundaries(
    epoch_s=0.1,
    other_link_bytes=LINK,
    other_port_bytes=2 * LINK,
    other_prefill=Prefill(COMPUTE, COMPUTE),
    segments=(SWITCH,),
)


def wanted(
    name: str, source: int, destination: int, kv_bytes: int, tokens: int = 15, ways: tuple[Via, ...] = BOTH
) -> Wish:
    return Wish(
        request=RequestId(name),
        source=GPUS[source - 1],
        destination=GPUS[destination - 1],
        kv_bytes=kv_bytes,
        tokens=tokens,
        ways=ways,
    )


def planned(boundaries: Boundaries, *moves: Wish) -> tuple[Planner, dict[str, Via]]:
    planner = Planner(boundaries)
    for move in moves:
        planner.ask(move, 0.0)
    return planner, {start.request: start.planned for start in planner.epoch(BUSY).starts}


def test_the_paper_s_figure_9() -> None:
    """Two moves that would each fit their own link do not both go over the switch: one goes by its tokens."""
    first, second, apart = wanted("a", 1, 4, 60), wanted("b", 2, 4, 60), wanted("c", 3, 4, 60, ways=KV)
    _, ways = planned(FIGURE_9, first, second, apart)
    assert sorted([ways["a"], ways["b"]]) == [Via.KV, Via.TOKENS]
    assert ways["c"] is Via.KV  # from the other side of the switch: it shares with them the port of GPU 4 alone


def test_a_move_that_waits_for_a_switch_says_so() -> None:
    """An operator who sees an idle link must not wonder why nothing goes over it."""
    planner, ways = planned(FIGURE_9, wanted("a", 1, 4, 60, ways=KV), wanted("b", 2, 3, 60, ways=KV))
    assert ways == {"a": Via.KV}
    assert planner.waiting[RequestId("b")].waits_for is Cause.SHARED


def test_four_sources_do_not_fill_one_port_four_times() -> None:
    """Each link could carry its move alone; what enters a GPU is bounded all the same."""
    moves = [wanted(f"r{source}", source, 4, 80, ways=KV) for source in (1, 2, 3)]
    limits = Boundaries(epoch_s=0.1, other_link_bytes=LINK, other_port_bytes=LINK)
    assert len(planned(limits, *moves)[1]) == 1


def test_one_source_shares_its_port_among_its_destinations() -> None:
    """A GPU that is emptied towards many does not decode at half its pace for it."""
    moves = [wanted(f"r{destination}", 1, destination, 80, ways=KV) for destination in (2, 3, 4)]
    limits = Boundaries(epoch_s=0.1, other_link_bytes=LINK, other_port_bytes=LINK)
    assert len(planned(limits, *moves)[1]) == 1


def test_a_move_larger_than_a_boundary_is_paced_by_the_narrowest_segment() -> None:
    """It takes as many epochs as it needs, its segment stays full, and wider ones have room for others."""
    planner = Planner(FIGURE_9)
    planner.ask(wanted("large", 1, 4, 250, ways=KV), 0.0)
    (start,) = planner.epoch(BUSY).starts
    assert planner.per_epoch(start, Via.KV) == LINK
    planner.ask(wanted("same switch", 2, 3, 10, ways=KV), 0.0)
    planner.ask(wanted("same port", 3, 4, 90, ways=KV), 0.0)
    planner.ended(RequestId("large"))
    begun = [[one.request for one in planner.epoch(BUSY).starts] for _ in range(3)]
    assert begun == [["same port"], ["same switch"], []]  # 250 bytes are 100, 100 and 50


def test_moves_by_tokens_count_the_destination_s_current_load() -> None:
    """A busy worker prefills for others ten times as slowly as an idle one: then the link is faster."""
    limits = Boundaries(epoch_s=0.1, other_link_bytes=LINK, other_prefill=Prefill(10 * COMPUTE, COMPUTE))
    for batches, way in (({}, Via.TOKENS), (BUSY, Via.KV)):
        planner = Planner(limits)
        planner.ask(wanted("a", 1, 4, 3 * LINK, 5 * COMPUTE), 0.0)
        assert [start.planned for start in planner.epoch(batches).starts] == [way]


MOVES = st.tuples(
    st.sampled_from([(a, b) for a in range(1, 5) for b in range(1, 5) if a != b]),
    st.integers(1, 260),
    st.integers(1, 70),
    st.sampled_from([BOTH, KV, (Via.TOKENS,)]),
)
EPOCHS = st.lists(st.tuples(st.lists(MOVES, max_size=5), st.integers(0, 3)), min_size=1, max_size=25)


class Book:
    """Independent book of each bin's load in each epoch, with every move paced as the planner says."""

    def __init__(self) -> None:
        self.drawn: Counter[tuple[int, tuple[str, ...]]] = Counter()

    def note(self, planner: Planner, move: Wish, epoch: int) -> None:
        assert move.planned is not None
        by_kv, per_epoch = move.planned is Via.KV, planner.per_epoch(move, move.planned)
        left = move.kv_bytes if by_kv else move.tokens
        bins = paths.path(FIGURE_9, move.source, move.destination) if by_kv else paths.compute(move.destination)
        while left > 0:
            for name in bins:
                self.drawn[epoch, name] += min(left, per_epoch)
            left -= per_epoch
            epoch += 1


@given(EPOCHS)
def test_no_segment_exceeds_its_boundary_in_any_epoch(epochs: list[tuple]) -> None:  # type: ignore[type-arg]
    """Whatever is requested, in whatever order: decodes beside the copies are not disturbed."""
    planner, book, ends = Planner(FIGURE_9), Book(), Counter[RequestId]()
    for number, (moves, lasting) in enumerate(epochs):
        for request in [one for one, end in ends.items() if end == number]:
            planner.ended(request)
        for index, ((source, destination), kv_bytes, tokens, ways) in enumerate(moves):
            planner.ask(wanted(f"{number}.{index}", source, destination, kv_bytes, tokens, ways), float(number))
        for start in planner.epoch(BUSY).starts:
            book.note(planner, start, number)
            ends[start.request] = number + 1 + lasting
    for (_, name), drawn in book.drawn.items():
        assert drawn <= paths.boundary(name, FIGURE_9, BUSY), name


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(MOVES, min_size=1, max_size=6))
def test_every_move_over_shared_segments_begins_eventually(moves: list[tuple]) -> None:  # type: ignore[type-arg]
    """Small moves that keep coming over the same switch starve nobody."""
    planner = Planner(FIGURE_9)
    for index, ((source, destination), kv_bytes, tokens, ways) in enumerate(moves):
        planner.ask(wanted(f"r{index}", source, destination, kv_bytes, tokens, ways), 0.0)
    begun: set[str] = set()
    for number in range(120):
        for index, (source, destination) in enumerate(((1, 4), (2, 3), (3, 4), (4, 1))):
            planner.ask(wanted(f"{number}.{index}", source, destination, 40, 10), math.inf)
        starts = planner.epoch(BUSY).starts
        begun |= {start.request for start in starts}
        for start in starts:
            planner.ended(start.request)
    assert {f"r{index}" for index in range(len(moves))} <= begun
