"""Weights that go to sleep piece by piece, over an allocator without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from melld.engine.worker.residency.weights import PIECE_BYTES, WEIGHTS_TAG, SleepMode


class Allocator:
    """As much of vLLM's allocator as is used here: it puts to sleep what it knows of."""

    def __init__(self, *sizes: int) -> None:
        kinds = [(WEIGHTS_TAG, size) for size in sizes] + [("kv_cache", 1 << 30)]
        self.pointer_to_data: dict[int, Any] = {
            number: SimpleNamespace(handle=(0, size), tag=tag) for number, (tag, size) in enumerate(kinds)
        }
        self.asleep: list[list[int]] = []

    def sleep(self, tag: str) -> None:
        assert tag == WEIGHTS_TAG
        self.asleep.append(list(self.pointer_to_data))


@pytest.mark.parametrize(("pieces", "expected"), [(0, []), (1, [[0, 1]]), (9, [[0, 1], [2], [3]])])
def test_an_engine_that_is_wanted_again_stops_after_a_piece(pieces: int, expected: list[list[int]]) -> None:
    """The weights asleep by then are woken; KV memory is freed only when all weights are."""
    half = PIECE_BYTES // 2
    allocator = Allocator(half, half, 3 * half, 1)
    whole = allocator.pointer_to_data
    is_whole = SleepMode._in_pieces(allocator, lambda: len(allocator.asleep) >= pieces)
    assert (is_whole, allocator.asleep, allocator.pointer_to_data is whole) == (pieces == 9, expected, True)
