"""What clients get of each family's answers with the chosen parsers: calls, thoughts, text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from melld.engine.answer_formats import REASONING, TOOLS
from tests.engine.answer_families import CITIES, FAMILIES, Family

CALLED = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CALLED}}
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
THINKS = [one for one in FAMILIES if one.reasoning and one.think[1]]

WITHOUT_A_ROW = {
    "cohere_command3": "needs the package cohere_melody, which is not installed",
    "cohere_command4": "likewise",
    "glm45": "the class of glm47",
    "phi4_mini_json": "a stream of it tells neither calls nor text",
    "qwen3_json": "the class of hermes",
    "qwen3_xml": "the class of qwen3_coder",
    "xlam": "its models' templates have no marker of their own",
    "hf": "by the tokenizer's response_template, not by a row",
}
REASONING_WITHOUT_A_ROW = {
    "cohere_command3": "as its tools",
    "cohere_command4": "as its tools",
    "deepseek_r1": "by a prompt that opens a thought, besides its row",
    "glm47": "the class of glm45",
    "hf": "by the tokenizer's response_template",
    "holo2": "Holo 2 says of itself only what Qwen3-VL says",
    "minimax_m2_append_think": "leaves thoughts in the text; minimax_m2 tells them apart",
}


class Told(NamedTuple):
    """What a client gets."""

    thought: str
    text: str
    calls: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def plain(demo_model: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(demo_model)


def parser_of(family: Family, tokenizer: PreTrainedTokenizerFast) -> Any:
    kind = ParserManager.get_parser(family.tools, family.reasoning, enable_auto_tools=True, tokenizer=tokenizer)
    return kind(tokenizer, request_of(family).tools, chat_template_kwargs={})


def tokenizer_of(family: Family, demo_model: Path) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_model)
    tokenizer.add_tokens([one.strip() for one in (*family.tokens, *family.think) if one], special_tokens=False)
    return tokenizer


def request_of(family: Family) -> ChatCompletionRequest:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "tool_choice": "auto"}
    return ChatCompletionRequest(**asked)


def whole(family: Family, tokenizer: PreTrainedTokenizerFast, text: str) -> Told:
    """Return the answer in one piece."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    thought, content, calls = parser_of(family, tokenizer).parse(
        text, request_of(family), enable_auto_tools=True, model_output_token_ids=ids
    )
    return Told(thought or "", content or "", [(one.name, json.loads(one.arguments)) for one in calls or []])


def streamed(family: Family, tokenizer: PreTrainedTokenizerFast, text: str) -> Told:
    """Return the answer token by token, joined as clients join it."""
    parser, request, prompt = parser_of(family, tokenizer), request_of(family), tokenizer.encode("Hello")
    thought, content, names, arguments = "", "", {}, dict[int, str]()
    pieces = list(_pieces(tokenizer, text))
    for number, (piece, token) in enumerate(pieces):
        delta = parser.parse_delta(piece, [token], request, prompt, finished=number == len(pieces) - 1)
        if delta is None:
            continue
        thought += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name:
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return Told(thought, content, [(names[n], json.loads(arguments[n])) for n in sorted(names)])


def _pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> Iterator[tuple[str, int]]:
    ids, seen = tokenizer.encode(text, add_special_tokens=False), ""
    for number, token in enumerate(ids):
        now = tokenizer.decode(ids[: number + 1])
        yield now[len(seen) :], token
        seen = now


@EVERY
@pytest.mark.parametrize("tell", [whole, streamed])
@pytest.mark.parametrize("count", [1, 2])
def test_tool_calls_are_parsed(family: Family, demo_model: Path, tell: Any, count: int) -> None:
    """An agent gets one call, or two at once, with their arguments, and no markup as text."""
    tokenizer = tokenizer_of(family, demo_model)
    ends = family.think[1] if family.reasoning else ""
    told = tell(family, tokenizer, ("Look it up." + ends if ends else "") + family.answer(count))
    assert told.calls == [("get_weather", {"city": city}) for city in CITIES[:count]]
    assert told.text.strip() == ""
    assert told.thought.strip() == ("Look it up." if ends else "")


@pytest.mark.parametrize("family", THINKS, ids=lambda one: one.name)
@pytest.mark.parametrize("tell", [whole, streamed])
def test_a_thought_is_separated_from_the_answer(family: Family, demo_model: Path, tell: Any) -> None:
    """A chat window folds the one and shows the other."""
    told = tell(family, tokenizer_of(family, demo_model), f"One city.{family.think[1]}It rains.")
    assert (told.thought.strip(), told.text.strip(), told.calls) == ("One city.", "It rains.", [])


@EVERY
@pytest.mark.parametrize("tell", [whole, streamed])
def test_a_text_without_calls_stays_a_text(family: Family, demo_model: Path, tell: Any) -> None:
    """Tools that are offered and not called change nothing."""
    ends = family.think[1] if family.reasoning else ""
    told = tell(family, tokenizer_of(family, demo_model), ends + "It rains in Paris.")
    assert (told.text.strip(), told.calls) == ("It rains in Paris.", [])


def test_every_parser_of_vllm_has_a_row_or_a_reason() -> None:
    """A parser that a new vLLM brings is decided on, not missed."""
    assert set(ToolParserManager.list_registered()) - {row.parser for row in TOOLS} == set(WITHOUT_A_ROW)
    missing = set(ReasoningParserManager.list_registered()) - {row.parser for row in REASONING}
    assert missing == set(REASONING_WITHOUT_A_ROW) - {"deepseek_r1"}
    known = set(ToolParserManager.list_registered()) | set(ReasoningParserManager.list_registered())
    assert {row.parser for row in (*TOOLS, *REASONING)} <= known
