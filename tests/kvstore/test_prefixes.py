"""The index of prefixes: it finds what a worker has computed, and keeps no more than a worker can."""

from hypothesis import given
from hypothesis import strategies as st

from melld.ids import RequestId, WorkerId
from melld.kvstore.prefixes import PrefixIndex

W0, W1 = WorkerId("w0"), WorkerId("w1")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
BLOCK = 4


def index(blocks: int = 100) -> PrefixIndex:
    """Two workers with empty caches."""
    made = PrefixIndex()
    for worker in (W0, W1):
        made.open_worker(worker, BLOCK, blocks)
    return made


def test_a_prompt_with_a_common_beginning_is_found_where_the_first_ran() -> None:
    """In whole blocks, and at least one token is left to compute."""
    prefixes = index()
    assert prefixes.arrived(A, range(10), None) == {}
    prefixes.placed(A, W1)
    assert prefixes.arrived(B, [*range(10), 99], None) == {W1: 8}
    assert prefixes.arrived(C, range(8), None) == {W1: 7}


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    """The answer's blocks were computed where it was made."""
    prefixes = index()
    prefixes.arrived(A, range(10), None)
    prefixes.placed(A, W0)
    prefixes.ended(A, W0, range(10, 19))
    assert prefixes.arrived(B, range(40), None) == {W0: 16}


def test_other_beginnings_and_other_salts_share_nothing() -> None:
    """One different token, salt, adapter or image changes the KV of all that follows."""
    prefixes = index()
    prefixes.arrived(A, range(12), "salt")
    prefixes.placed(A, W0)
    assert prefixes.arrived(B, [7, *range(1, 12)], "salt") == {}
    assert prefixes.arrived(C, range(12), "other") == {}


def test_a_moved_request_is_found_on_both_workers() -> None:
    """The source keeps its blocks in its cache until it needs them."""
    prefixes = index()
    prefixes.arrived(A, range(8), None)
    prefixes.placed(A, W0)
    prefixes.placed(A, W1)
    assert prefixes.arrived(B, range(20), None) == {W0: 8, W1: 8}


def test_a_restarted_worker_s_prefixes_are_forgotten() -> None:
    """Its cache is gone."""
    prefixes = index()
    prefixes.arrived(A, range(8), None)
    prefixes.placed(A, W0)
    prefixes.placed(A, W1)
    prefixes.close_worker(W0)
    assert prefixes.arrived(B, range(20), None) == {W1: 8}
    prefixes.open_worker(W0, BLOCK, 100)
    assert prefixes.arrived(B, range(20), None) == {W1: 8}


def test_the_oldest_go_first_and_a_prompt_s_beginning_last() -> None:
    """As in vLLM, where the end of a prompt is evicted before its beginning."""
    prefixes = index(blocks=4)
    for request, first in ((A, 0), (B, 100)):
        prefixes.arrived(request, range(first, first + 12), None)
        prefixes.placed(request, W0)
        prefixes.ended(request, W0, ())
    assert prefixes.arrived(A, range(20), None) == {W0: 4}
    assert prefixes.arrived(B, range(100, 120), None) == {W0: 12}


def test_a_request_before_any_worker_is_served_but_not_indexed() -> None:
    """And a worker may end that never was ready."""
    prefixes = PrefixIndex()
    assert prefixes.arrived(A, range(10), None) == {}
    prefixes.close_worker(W0)
    prefixes.open_worker(W0, BLOCK, 100)
    prefixes.placed(A, W0)
    prefixes.ended(A, W0, range(10))
    prefixes.ended(C, None, ())
    assert prefixes.arrived(B, range(20), None) == {}


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=30), st.sampled_from([W0, W1])), max_size=8))
def test_every_match_ran_on_that_worker(history: list[tuple[list[int], WorkerId]]) -> None:
    """The tokens found are the beginning of one of its requests; with room, of the longest."""
    prefixes, ran = index(), {W0: [], W1: []}  # type: ignore[var-annotated]
    for number, (tokens, worker) in enumerate(history):
        request = RequestId(str(number))
        found = prefixes.arrived(request, tokens, None)
        for one in (W0, W1):
            alike = [common(tokens, other) // BLOCK * BLOCK for other in ran[one]]
            assert found.get(one, 0) == min(max(alike, default=0), max(len(tokens) - 1, 0))
        prefixes.placed(request, worker)
        ran[worker].append(tokens)


def common(one: list[int], other: list[int]) -> int:
    """Return the length of their common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
