"""Which parsers of tool calls and reasoning a model gets by default."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.config import ModelConfig
from melld.engine.answer_formats import REASONING, TOOLS, ModelFacts, reasoning_of, tools_of
from melld.engine.model_files import answer_formats, model_facts
from tests.engine.answer_families import FAMILIES, PLAIN, SWITCH, Family

EVERY = pytest.mark.parametrize("family", FAMILIES + PLAIN, ids=lambda one: one.name)


def facts_of(family: Family) -> ModelFacts:
    return ModelFacts(family.model_type, family.template, "".join(family.tokens) + "Ġ</")


@EVERY
def test_a_family_gets_its_parsers(family: Family) -> None:
    """Agents work with the model out of the box, and thoughts are separated from answers."""
    assert (tools_of(facts_of(family)).parser, reasoning_of(facts_of(family)).parser) == (
        family.tools,
        family.reasoning,
    )


def test_two_candidates_are_named_and_none_is_chosen() -> None:
    """A wrong parser would take the whole answer for a thought: the operator decides."""
    choice = reasoning_of(ModelFacts("new", SWITCH))
    assert choice.parser is None
    assert str(choice) == "none (deepseek_r1 or qwen3: name one)"


def test_a_parser_whose_token_is_missing_is_not_chosen() -> None:
    """vLLM refuses to start with it, and a fine-tuned model with another tokenizer would not be served at all."""
    assert tools_of(ModelFacts("mistral", "[TOOL_CALLS]", "")).parser is None


@given(st.text(), st.text(), st.text())
def test_any_template_gets_one_parser_or_none(model_type: str, template: str, tokens: str) -> None:
    """An unknown model is served as it always was."""
    known = {row.parser for row in (*TOOLS, *REASONING)} | {"deepseek_r1", None}
    facts = ModelFacts(model_type, template, tokens)
    assert {tools_of(facts).parser, reasoning_of(facts).parser} <= known


# -- the model's files -------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<tool_call>" + SWITCH}))
    return tmp_path


def test_the_operator_s_choice_of_parser_wins(model: Path) -> None:
    """A named parser is taken as it is; `none` and a switched-off tool choice mean no parser."""
    path = str(model)
    assert answer_formats(ModelConfig(path=path)).tools.parser == "hermes"
    named = {"tool-call-parser": "mistral", "reasoning_parser": "none"}
    assert answer_formats(ModelConfig(path=path, vllm=named)).options == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "mistral",
        "reasoning_parser": "",
    }
    assert answer_formats(ModelConfig(path=path, vllm={"enable_auto_tool_choice": False})).tools.parser is None


def test_the_operator_s_template_is_the_one_examined(model: Path, tmp_path: Path) -> None:
    """Replacing a model's template changes its answer format."""
    (tmp_path / "other.jinja").write_text("<tool_call><function=")
    given = {"chat_template": str(tmp_path / "other.jinja")}
    assert answer_formats(ModelConfig(path=str(model), vllm=given)).tools.parser == "qwen3_coder"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "a", "tokenizer_config.json": '{"chat_template": "b"}'}, "a"),
        ({"chat_template.json": '{"chat_template": "c"}'}, "c"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "e"}]}
                )
            },
            "e",
        ),
        ({"tokenizer_config.json": "{", "config.json": "[]"}, ""),
        ({}, ""),
    ],
)
def test_a_template_is_found_wherever_transformers_finds_it(
    tmp_path: Path, files: dict[str, str], template: str
) -> None:
    """Old and new models keep it in different files; a damaged one stops nothing here."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert model_facts(str(tmp_path)).template == template
