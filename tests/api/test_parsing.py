"""A body is parsed as its model would, but item by item and only up to the first mistake."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from melld.api.answers import Refusal
from melld.api.parsing import MAX_ACTIONS, MAX_INNER_VALUES, NOT_LOOKED_AT, SMALL, patient


class Text(BaseModel):
    """A kind of message."""

    text: str
    number: int = 0


class Parts(BaseModel):
    """Another."""

    parts: list[Text]


class Chat(BaseModel):
    """As vLLM's models are made: unions in lists, and rules before and after."""

    model_config = ConfigDict(extra="allow")
    messages: str | list[Text | Parts]
    stop_token_ids: list[int] = []
    count: int = 0
    _CONSTANTS: dict[str, float] = {"temperature": 1.0}
    _made: list[int] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _count(self) -> "Chat":
        self.count = len(self.messages)
        return self


PARSE = patient(Chat)
TEXTS = st.fixed_dictionaries({"text": st.text(max_size=3) | st.integers(), "number": st.integers() | st.just("7")})
ITEMS = TEXTS | st.fixed_dictionaries({"parts": st.lists(TEXTS, max_size=3)}) | st.integers()


def attempt(parse: Callable[[Any], BaseModel], body: dict[str, Any]) -> Any:
    """Return the parsed result, or where it first goes wrong (ignoring type names)."""
    try:
        made = parse(body)
    except ValidationError as error:
        return [place for place in error.errors()[0]["loc"] if "[" not in str(place)]
    assert isinstance(made, Chat)
    return made.model_dump()


@given(st.lists(ITEMS, max_size=5) | st.text(max_size=3) | st.none())
def test_the_parsed_body_equals_the_model_s(messages: Any) -> None:
    """Nothing that worked is refused, and numbers in strings are still numbers."""
    body = {"messages": messages}
    wanted, made = attempt(Chat.model_validate, body), attempt(PARSE, body)
    assert made == wanted


def test_a_model_s_constants_are_not_copied_for_each_request() -> None:
    """vLLM keeps default sampling parameters in a private attribute, which pydantic copies deeply."""
    one, other = (PARSE({"messages": ""}) for _ in range(2))
    assert isinstance(one, Chat)
    assert isinstance(other, Chat)
    assert one._CONSTANTS == {"temperature": 1.0}
    assert one._CONSTANTS is other._CONSTANTS
    assert one._made == []
    assert one._made is not other._made


def test_nothing_is_read_after_the_first_bad_item() -> None:
    """A client is told of its first mistake; a thousand of them cost no more."""
    with pytest.raises(ValidationError) as refused:
        PARSE({"messages": [{"text": "a"}, {}, *({} for _ in range(9))]})
    wrong = {
        error["loc"][2] for error in refused.value.errors() if error["type"] != NOT_LOOKED_AT and len(error["loc"]) > 2
    }
    assert wrong == {1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"parts": [{}] * MAX_INNER_VALUES}]}, "messages"),
        ({"messages": "a", "stop_token_ids": ["x"] * (SMALL + 1)}, "stop_token_ids"),
        ({"messages": "a", "prompt": [-1] * (SMALL + 1)}, "prompt"),
        ({"messages": "a", "prompt": [["x"] * 99] * 99}, "prompt"),
        ({"messages": "a", "vllm_xargs": {"a": [1] * SMALL}}, "vllm_xargs"),
        ({"messages": "a", "chat_template_kwargs": dict.fromkeys(map(str, range(SMALL + 1)))}, "chat_template_kwargs"),
        ({"messages": "a", "logit_bias": {str(number): "x" for number in range(SMALL + 1)}}, "logit_bias"),
        ({"messages": "a", "bad_words": [1] * (SMALL + 1)}, "bad_words"),
        ({"messages": "a", "bad_words": ["x"] * (SMALL + 1)}, "bad_words"),
        ({"messages": "a", "structured_outputs": {"choice": ["x", *[1] * SMALL]}}, "structured_outputs"),
        ({"messages": [{"actions": [{}] * MAX_ACTIONS}]}, "messages"),
    ],
)
def test_what_cannot_be_parsed_in_steps_is_bounded(body: dict[str, Any], param: str) -> None:
    """No C code is given input that would keep it busy for long."""
    with pytest.raises(Refusal) as refused:
        PARSE(body)
    assert refused.value.answer.param == param
