"""The texts of a large call come and go a few at a time, and none is lost on the way."""

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
    """Texts that are done after some turns of the loop each, and what is known of them."""

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
def test_each_text_has_its_answer_in_whichever_order_they_come(turns: list[int]) -> None:
    """A vector that went to another text would never be noticed."""

    async def check() -> None:
        texts = Texts()
        found = [item async for item in some_at_a_time(*(texts.one(*pair) for pair in enumerate(turns)))]
        assert sorted(found) == [(number, number) for number in range(len(turns))]

    asyncio.run(check())


async def test_a_large_call_leaves_room_for_others() -> None:
    """Of a thousand texts only some wait at a time."""
    texts = Texts()
    assert (
        len([item async for item in some_at_a_time(*(texts.one(n, n % 3) for n in range(4 * AT_ONCE)))]) == 4 * AT_ONCE
    )
    assert texts.most == AT_ONCE


@pytest.mark.parametrize("failing", [True, False])
async def test_no_text_goes_on_when_one_fails_or_the_client_leaves(failing: bool) -> None:
    """What nobody waits for is not computed."""
    texts = Texts()
    answers = some_at_a_time(*(texts.one(n, 3 if n == 1 else 10_000, failing and n == 1) for n in range(AT_ONCE)))
    async with contextlib.aclosing(answers):
        with pytest.raises(ValueError, match="1") if failing else contextlib.nullcontext():
            assert await anext(answers) == (1, 1)
    assert texts.at_work == 0


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_the_json_of_an_answer_in_pieces_is_the_same(content: dict[str, object]) -> None:
    """Only other threads notice."""
    assert InPieces(content).body == JSONResponse(content).body


def test_an_array_is_written_as_its_numbers() -> None:
    """vLLM leaves vectors as arrays for a class that can write them."""
    vector = np.array([0.1, -2.5], np.float32)
    assert json.loads(InPieces({"data": [{"embedding": vector}]}).body)["data"][0]["embedding"] == vector.tolist()
