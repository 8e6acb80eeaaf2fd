"""Outputs that are only next tokens bypass vLLM's output processing, whoever made them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from melld.api.serving.telling import telling
from melld.engine.frontend.codec import EngineCodec
from melld.engine.frontend.plain_outputs import Gathered, before_vllm, parses_nothing, take_step


class State:
    """A request's state, past its first output, which takes all plain ones."""

    is_prefilling = False

    def __init__(self) -> None:
        self.plain: Any = self
        self.queue: Any = None
        self.taken: list[list[int]] = []

    def add(self, token_ids: list[int], *_: Any) -> None:
        self.taken.append(token_ids)


def test_a_vllm_worker_s_plain_output_bypasses_the_output_processor() -> None:
    """Each step of a real engine carries the version of its weights."""
    sent = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[7])], weight_version="default")
    outputs = EngineCodec().decode_outputs(MsgpackEncoder().encode(sent), 0)
    state, left = State(), list[Any]()
    process = before_vllm({"a": state}, lambda rest, *_, **__: left.extend(rest))
    process(outputs.outputs, 0.0, None, weight_version=outputs.weight_version)
    assert (state.taken, left) == ([[7]], [])


def test_a_step_is_taken_whole_or_not_at_all() -> None:
    """vLLM counts a step once, so it gets all of one that holds more than next tokens."""
    states = {"a": State(), "b": State()}
    plain = [EngineCoreOutput("a", [1]), EngineCoreOutput("gone", [2]), EngineCoreOutput("b", [3])]
    last = EngineCoreOutput("b", [4], finish_reason=FinishReason.LENGTH)
    assert take_step(states, EngineCoreOutputs(outputs=[*plain, last])) is None
    assert [state.taken for state in states.values()] == [[], []]
    assert take_step(states, EngineCoreOutputs(outputs=plain)) is not None
    assert [state.taken for state in states.values()] == [[[1]], [[3]]]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_failing_request_fails_alone(is_at_once: bool) -> None:
    """One answer that cannot be decoded is no reason to end all other calls of its model."""

    class Failing(State):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[Exception] = []
            self.queue = SimpleNamespace(put=self.errors.append)

        def add(self, token_ids: list[int], *_: Any) -> None:
            raise OverflowError(token_ids)

        def hand_back(self) -> None:
            raise OverflowError

    broken, whole, left = Failing(), State(), list[Any]()
    states = {"a": broken, "b": whole}
    step = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1]), EngineCoreOutput("b", [2])])
    if is_at_once:
        take_step(states, step)
    else:
        before_vllm(states, lambda *_: None)(step.outputs, 0.0, None)
    assert [type(error) for error in broken.errors] == [OverflowError]
    assert whole.taken == [[2]]
    still = [EngineCoreOutput("a", [3]), EngineCoreOutput("a", [4], finish_reason=FinishReason.LENGTH)]
    before_vllm(states, lambda rest, *_: left.extend(rest))(still, 0.0, None)
    assert left == [], "vLLM would decode them"


def test_a_short_answer_that_cannot_be_decoded_fails_alone() -> None:
    """Its tokens are decoded only as its last output goes to vLLM."""
    errors, left = list[Exception](), list[Any]()
    broken = State()
    broken.queue = SimpleNamespace(put=errors.append)
    broken.plain = Gathered(SimpleNamespace(update=lambda *_: 1 // 0), None)
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
