"""A large call's texts are processed a few at a time, and none is lost."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from melld.api.serving.many_texts import AT_ONCE, InPieces, some_at_a_time

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


class Texts:
    """Texts that take some turns of the loop each, with counters."""

    def __init__(self) -> None:
        self.at_work = self.most = 0

    async def one(self, number: int, turns: int, failing: bool = False) -> AsyncGenerator[int, None]:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            if failing:
                raise ValueError(number)
            yield number
        finally:
            self.at_work -= 1


@given(st.lists(st.integers(0, 5), max_size=40))
def test_each_text_gets_its_own_answer_in_any_order(turns: list[int]) -> None:
    """A vector assigned to the wrong text would go unnoticed."""

    async def check() -> None:
        texts = Texts()
        found = [item async for item in some_at_a_time(*(texts.one(*pair) for pair in enumerate(turns)))]
        assert sorted(found) == [(number, number) for number in range(len(turns))]

    asyncio.run(check())


async def test_a_large_call_leaves_room_for_others() -> None:
    """Only a few of a thousand texts are in the queue at a time."""
    texts = Texts()
    assert (
        len([item async for item in some_at_a_time(*(texts.one(n, n % 3) for n in range(4 * AT_ONCE)))]) == 4 * AT_ONCE
    )
    assert texts.most == AT_ONCE


@pytest.mark.parametrize("failing", [True, False])
async def test_remaining_texts_stop_when_one_fails_or_the_client_leaves(failing: bool) -> None:
    """Nothing is computed that nobody waits for."""
    texts = Texts()
    answers = some_at_a_time(*(texts.one(n, 3 if n == 1 else 10_000, failing and n == 1) for n in range(AT_ONCE)))
    async with contextlib.aclosing(answers):
        with pytest.raises(ValueError, match="1") if failing else contextlib.nullcontext():
            assert await anext(answers) == (1, 1)
    assert texts.at_work == 0


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_json_written_in_pieces_is_identical(content: dict[str, object]) -> None:
    """Only other threads notice the difference."""
    assert InPieces(content).body == JSONResponse(content).body


def test_an_array_is_written_as_its_numbers() -> None:
    """vLLM leaves vectors as arrays for an encoder that can write them."""
    vector = np.array([0.1, -2.5], np.float32)
    assert json.loads(InPieces({"data": [{"embedding": vector}]}).body)["data"][0]["embedding"] == vector.tolist()
