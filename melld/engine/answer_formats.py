# ruff: noqa: RUF001
"""Chooses vLLM's tool call and reasoning parsers from a model's own files.

Owns the table: which markers of a chat template, and which model types, mean which parser.  Pure; `model_files` reads.
Sources: the parsers of the pinned vLLM (`vllm.tool_parsers`, `vllm.reasoning`, `vllm.parser`) and vLLM's documents
(features/tool_calling.md, features/reasoning_outputs.md).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

AUTO, NONE = "auto", "none"


class ModelFacts(NamedTuple):
    """Facts from a model's files; empty where a file is missing."""

    model_type: str = ""
    template: str = ""
    """The chat template."""
    tokens: str = ""
    """The tokenizer's files, in which a special token stands as text."""
    has_response_template: bool = False
    has_mistral_tokenizer: bool = False


class Row(NamedTuple):
    """A parser, and the marks of a model that gets it.

    A row that names model types beats rows that name none: families share markers.
    """

    parser: str
    markers: Sequence[str] = ()
    """All stand in the chat template."""
    without: Sequence[str] = ()
    """None stands in the chat template."""
    types: Sequence[str] = ()
    """Beginnings of `model_type`."""
    needs: str = ""
    """A token that the tokenizer must know: vLLM's parser refuses to start otherwise."""


JSON_CALL = ("<tool_call>",)
XML_CALL = ("<tool_call>", "<function=")
LLAMA_JSON = '{"name": function name, "parameters": dictionary of argument name and its value}'
DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
HY_3, HY_4 = ("hy_v3",), ("hy_v4",)

TOOLS = (
    Row("hermes", JSON_CALL, ("<function=", "<arg_key>")),  # Hermes 2 Pro and 3, Qwen 2.5, QwQ, Qwen 3
    Row("qwen3_coder", XML_CALL),  # Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3
    Row("mimo", JSON_CALL, types=("mimo",)),
    Row("step3p5", JSON_CALL, types=("step3p5", "step3p7")),
    Row("ernie45", JSON_CALL, types=("ernie4_5",)),
    Row("granite4", JSON_CALL, ("<function=",), types=("granite",)),
    Row("granite", ("<|tool_call|>",), types=("granite",)),
    Row("granite-20b-fc", ("<function_call>",), types=("gpt_bigcode",)),
    Row("glm47", ("<tool_call>", "<arg_key>")),  # the class of glm45, too
    Row("ling3", ("<tool_call>", "<arg_key>"), types=("bailing",)),
    Row("poolside_v1", ("<tool_call>", "<arg_key>"), types=("laguna",)),
    Row("hy_v3", types=HY_3, needs="<tool_call"),
    Row("hy_v4", types=HY_4, needs="<tool_call"),
    Row("hunyuan_a13b", ("<tool_calls>",), types=("hunyuan",)),
    Row("jamba", ("<tool_calls>",), types=("jamba",), needs="<tool_calls>"),
    Row("llama3_json", ("<|python_tag|>",), ("<function=",), needs="<|python_tag|>"),
    Row("llama3_json", (LLAMA_JSON,), needs="<|python_tag|>"),
    Row("llama4_json", (LLAMA_JSON,), types=("llama4",), needs="<|python_tag|>"),
    Row("llama4_pythonic", ("func_name1(",), types=("llama4",)),
    Row("pythonic", ("func_name1(",), (LLAMA_JSON,)),
    Row("mistral", ("[TOOL_CALLS]",), needs="[TOOL_CALLS]"),
    Row("deepseek_v3", (DEEPSEEK_CALLS, "```json"), needs=DEEPSEEK_CALLS),
    Row("deepseek_v31", (DEEPSEEK_CALLS,), ("```json",), needs=DEEPSEEK_CALLS),
    Row("deepseek_v32", types=("deepseek_v32",)),
    Row("deepseek_v4", types=("deepseek_v4",)),
    Row("deepseek_v41", types=("deepseek_v41",)),
    Row("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Row("kimi_k3", types=("kimi_k3",)),
    Row("minimax_m2", ("<minimax:tool_call>",)),
    Row("minimax_m3", ("]<]minimax[>[",)),
    Row("seed_oss", ("<seed:tool_call>",)),
    Row("step3", ("<｜tool_calls_begin｜>", "<steptml:invoke")),
    Row("olmo3", ("<function_calls>",), types=("olmo",)),
    Row("openai", types=("gpt_oss",)),  # vLLM takes no other, whatever the template
    Row("gemma4", ("<|tool_call>",)),
    Row("functiongemma", ("<start_function_call>",)),
    Row("gigachat3", ("function call<|role_sep|>",)),
    Row("gigachat3", ("<|function_call|>",)),
    Row("apertus", ("<|tools_prefix|>",)),
    Row("lfm2", types=("lfm2",), needs="<|tool_call_start|>"),
    Row("longcat", ("<longcat_tool_call>",)),
    Row("internlm", ("<|plugin|>",)),
    Row("dots", ("<dots_function_call>",)),
    Row("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    Row("inkling", ("<|content_invoke_tool_json|>",)),
    Row("muse_glimmer", ("<atem:function_calls>",)),
    Row("k2_horizon", ("<ifm|tool_calls>",)),
    Row("minicpm5", ("<function name=",), types=("minicpm",)),
)

THINK = ("<think>",)
REASONING = (
    Row("qwen3", THINK, types=("qwen3",)),
    Row("glm45", THINK, types=("glm",)),
    Row("nemotron_v3", THINK, types=("nemotron",)),
    Row("deepseek_v3", (*THINK, "thinking"), types=("deepseek_v3",)),
    Row("deepseek_r1", THINK, ("thinking",), types=("deepseek_v3",)),
    Row("deepseek_v3", types=("deepseek_v32",)),
    Row("deepseek_v4", types=("deepseek_v4",)),
    Row("deepseek_v41", types=("deepseek_v41",)),
    Row("kimi_k2", THINK, types=("kimi_k2",)),
    Row("kimi_k3", types=("kimi_k3",)),
    Row("minimax_m2", THINK, types=("minimax",)),
    Row("minimax_m3", ("<mm:think>",), needs="<mm:think>"),
    Row("mimo", THINK, types=("mimo",)),
    Row("step3", THINK, types=("step3_vl", "step3_text")),
    Row("step3p5", THINK, types=("step3p5", "step3p7")),
    Row("ernie45", THINK, types=("ernie4_5",)),
    Row("hunyuan_a13b", THINK, types=("hunyuan",)),
    Row("hy_v3", types=HY_3),
    Row("hy_v4", types=HY_4),
    Row("ling3", THINK, types=("bailing",)),
    Row("poolside_v1", THINK, types=("laguna",), needs="<assistant>"),
    Row("olmo3", THINK, types=("olmo",), needs="Ġ</"),
    Row("granite_thinking_parser", (*THINK, "<function="), types=("granite",)),
    Row("granite", ("Here is my thought process:",), types=("granite",)),
    Row("minicpmv", THINK, types=("minicpmv",)),
    Row("openai_gptoss", types=("gpt_oss",)),
    Row("gemma4", ("<|channel>",)),
    Row("seed_oss", ("<seed:think>",)),
    Row("mistral", ("[THINK]",), needs="[THINK]"),
    Row("inkling", ("<|content_thinking|>",)),
    Row("plamo3", ("<|plamo:begin_think:plamo|>",)),
    Row("muse_glimmer", ("to=self<|message|>",)),
    Row("k2_horizon", ("<ifm|think>",), needs="<ifm|think>"),
)

OPENS_THINKING = re.compile(r".*add_generation_prompt(?!.*</think>).*<think>", re.DOTALL)
"""A prompt that ends in an opened thought, as those of DeepSeek R1's distillations and QwQ do."""


class Choice(NamedTuple):
    """The parser chosen for a model, or why there is none."""

    parser: str | None = None
    candidates: Sequence[str] = ()
    """Several that fit, of which none is chosen."""
    by: str = "the chat template"

    def __str__(self) -> str:
        if self.parser is not None:
            return f"{self.parser} ({self.by})"
        return f"none ({' or '.join(self.candidates)}: name one)" if self.candidates else f"none ({self.by})"


def tools_of(facts: ModelFacts) -> Choice:
    """Return the parser of the model's tool calls."""
    if facts.has_mistral_tokenizer and not facts.template:
        return Choice("mistral", by="the tokenizer")
    if facts.has_response_template:
        return Choice("hf", by="the tokenizer's response_template")
    return _choice(TOOLS, facts, "the chat template shows no known tool call format")


def reasoning_of(facts: ModelFacts) -> Choice:
    """Return the parser of the model's reasoning."""
    if facts.has_response_template:
        return Choice("hf", by="the tokenizer's response_template")
    choice = _choice(REASONING, facts, "the chat template shows no known reasoning format")
    if choice.parser is not None or choice.candidates or THINK[0] not in facts.template:
        return choice
    if OPENS_THINKING.match(facts.template):
        return Choice("deepseek_r1")
    return Choice(candidates=("deepseek_r1", "qwen3"))


def _choice(rows: Sequence[Row], facts: ModelFacts, missing: str) -> Choice:
    fitting = [row for row in rows if _fits(row, facts)]
    typed = [row for row in fitting if row.types]
    if longest := max((len(_type_of(row, facts)) for row in typed), default=0):
        fitting = [row for row in typed if len(_type_of(row, facts)) == longest]
    parsers = tuple(dict.fromkeys(row.parser for row in fitting))
    if len(parsers) != 1:
        return Choice(candidates=parsers, by=missing)
    return Choice(parsers[0], by="the chat template" if fitting[0].markers else f"model_type {facts.model_type}")


def _fits(row: Row, facts: ModelFacts) -> bool:
    return (
        all(marker in facts.template for marker in row.markers)
        and not any(marker in facts.template for marker in row.without)
        and (not row.types or bool(_type_of(row, facts)))
        and row.needs in facts.tokens
    )


def _type_of(row: Row, facts: ModelFacts) -> str:
    """Return the longest of the row's types that the model's type begins with; empty if there is none."""
    return max((one for one in row.types if facts.model_type.startswith(one)), key=len, default="")
