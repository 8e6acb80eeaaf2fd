"""Next tokens bypass vLLM's output processing."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.v1.engine import EngineCoreOutput, FinishReason

from melld.api.serving.telling import telling
from melld.engine.frontend.plain_outputs import (
    Counts,
    Gathered,
    Others,
    before_vllm,
    parses_nothing,
    take_all,
    take_plain,
)
from melld.ids import RequestId


class State:
    """A request's state, past its first output, which takes all plain tokens."""

    is_prefilling = False

    def __init__(self) -> None:
        self.plain: Any = self
        self.queue: Any = None
        self.stats = SimpleNamespace(num_generation_tokens=1, last_token_ts=1.0)
        self.taken: list[list[int]] = []

    def add(self, token_ids: list[int]) -> None:
        self.taken.append(token_ids)

    def hand_back(self) -> None:
        """There is nothing to do."""


def tokens(**tokens: list[int]) -> Others:
    """Return such tokens as a step has."""
    return [(RequestId(request), token_ids) for request, token_ids in tokens.items()]


def test_tokens_are_taken_at_once_all_or_none() -> None:
    """vLLM counts a step once, so it gets all of one that is not only for plain answers."""
    states = {"a": State(), "b": State(), "new": State()}
    states["new"].is_prefilling = True
    plain = tokens(a=[1], gone=[2], b=[3, 4])
    assert take_all(states, [*plain, *tokens(new=[5])], 3.0) is None
    assert [state.taken for state in states.values()] == [[], [], []]
    assert take_all(states, plain, 3.0) is not None
    assert [state.taken for state in states.values()] == [[[1]], [[3, 4]], []]


def test_tokens_count_as_vllm_counts_them() -> None:
    """Metrics do not tell which way a token took."""
    states = {"a": State(), "b": State(), "raw": SimpleNamespace(is_prefilling=False)}
    counts = Counts()
    assert take_plain(states, tokens(a=[1], raw=[2], b=[3, 4]), 3.0, counts) == tokens(raw=[2])
    step = SimpleNamespace(num_generation_tokens=1, inter_token_latencies_iter=[0.5])
    left = list[Any]()
    before_vllm(states, lambda rest, *_: left.extend(rest))([counts, EngineCoreOutput("raw", [2])], 3.0, step)
    assert (step.num_generation_tokens, step.inter_token_latencies_iter) == (4, [0.5, 2.0, 2.0])
    assert states["b"].stats == SimpleNamespace(num_generation_tokens=3, last_token_ts=3.0)
    assert left == [EngineCoreOutput("raw", [2])]


def test_a_failing_request_fails_alone() -> None:
    """One answer that cannot be decoded is no reason to end all other calls of its model."""

    class Failing(State):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[Exception] = []
            self.queue = SimpleNamespace(put=self.errors.append)

        def add(self, token_ids: list[int]) -> None:
            raise OverflowError(token_ids)

        def hand_back(self) -> None:
            raise OverflowError

    broken, whole, left = Failing(), State(), list[Any]()
    states = {"a": broken, "b": whole}
    take_all(states, tokens(a=[1], b=[2]), 3.0)
    assert [type(error) for error in broken.errors] == [OverflowError]
    assert whole.taken == [[2]]
    take_all(states, tokens(a=[3]), 4.0)
    still = [EngineCoreOutput("a", [4], finish_reason=FinishReason.LENGTH)]
    before_vllm(states, lambda rest, *_: left.extend(rest))(still, 0.0, None)
    assert left == [], "vLLM would decode them"


def test_a_short_answer_that_cannot_be_decoded_fails_alone() -> None:
    """Its tokens are decoded only as its last output goes to vLLM."""
    errors, left = list[Exception](), list[Any]()
    broken = State()
    broken.queue = SimpleNamespace(put=errors.append)
    broken.plain = Gathered(SimpleNamespace(update=lambda *_: 1 // 0))
    last = [EngineCoreOutput(name, [1], finish_reason=FinishReason.LENGTH) for name in "ab"]
    before_vllm({"a": broken}, lambda rest, *_: left.extend(rest))(last, 0.0, None)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert left == [last[1]]


class Parser(DelegatingParser):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    tool_parser_cls = Hermes2ProToolParser


class Tokenizer:
    """As much of a tokenizer as a parser looks at."""

    def get_vocab(self) -> dict[str, int]:
        return {"<tool_call>": 1, "</tool_call>": 2}

    def encode(self, _text: str, **_: Any) -> list[int]:
        return [3]

    def decode(self, _tokens: list[int], **_: Any) -> str:
        return ""


@pytest.mark.parametrize(
    ("tools", "parses"), [(None, False), ([{"type": "function", "function": {"name": "f"}}], True)]
)
def test_a_parser_without_a_use_is_not_called(tools: Any, parses: bool) -> None:
    """A model with a parser costs no more than one without, as long as no tools are offered."""
    parser_class = telling(Parser, "call_", tells_twice=True)
    assert parser_class is not None
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hello"}], tools=tools)
    parser = parser_class(Tokenizer(), request.tools)
    arguments = {"delta_text": "a", "delta_token_ids": [5], "request": request, "prompt_token_ids": [4]}
    message = parser.parse_delta(**arguments, finished=False)
    assert message.content == "a"
    assert parses_nothing(parser.parse_delta, arguments) is not parses
