"""Reads a model's answer formats from its files, and returns the matching vLLM options.

Reads files of the model's directory, or of its copy from the Hugging Face Hub.  Never imports vLLM or transformers, and
never uses the network.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from melld.config import ModelConfig
from melld.engine.answer_formats import AUTO, NONE, Choice, ModelFacts, reasoning_of, tools_of

TOOLS_KEY, REASONING_KEY, ENABLE_KEY = "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice"
TEMPLATE_KEY = "chat_template"
FILES = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json", "tekken.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files that say what a model's answers look like; `check_hub` downloads them before anything slow."""
OPERATOR = "[model.vllm]"
SWITCHED_OFF = Choice(by=f"switched off by {OPERATOR}")


class AnswerFormats(NamedTuple):
    """The parsers of a model's tool calls and reasoning, and who chose them."""

    tools: Choice
    reasoning: Choice

    def __str__(self) -> str:
        return f"tools: {self.tools}, reasoning: {self.reasoning}"

    @property
    def says_something(self) -> bool:
        """Return True if a parser was chosen, or might be."""
        return any(one.parser or one.candidates for one in self)

    @property
    def options(self) -> dict[str, Any]:
        """Return these parsers as options of `vllm serve`."""
        tools, reasoning = self.tools.parser, self.reasoning.parser or ""
        return {ENABLE_KEY: tools is not None, TOOLS_KEY: tools, REASONING_KEY: reasoning}

    @property
    def no_tools_because(self) -> str:
        """Say why requests with tools are refused and what the operator can do; empty if they are not."""
        if self.tools.parser is not None:
            return ""
        which = " or ".join(self.tools.candidates) or "the parser for its format"
        return f"this model's tool calls cannot be parsed, {self.tools.by}: set [model.vllm] {TOOLS_KEY} to {which}"


def answer_formats(model: ModelConfig) -> AnswerFormats:
    """Return the parsers named in `[model.vllm]`, else those that the model's files imply.

    `auto`, the default, chooses; `none` switches off.
    """
    given = {key: model.vllm_option(key) for key in (TOOLS_KEY, REASONING_KEY, ENABLE_KEY, TEMPLATE_KEY)}
    template = given[TEMPLATE_KEY] if isinstance(given[TEMPLATE_KEY], str) else ""
    named = [given[key] if isinstance(given[key], str) else AUTO for key in (TOOLS_KEY, REASONING_KEY)]
    if given[ENABLE_KEY] is False:
        named[0] = NONE
    return _answer_formats(model.path, template, *named)


@functools.cache
def _answer_formats(path: str, template: str, tools: str, reasoning: str) -> AnswerFormats:
    facts = model_facts(path, template) if AUTO in (tools, reasoning) else ModelFacts()
    return AnswerFormats(
        tools_of(facts) if tools == AUTO else _named(tools),
        reasoning_of(facts) if reasoning == AUTO else _named(reasoning),
    )


def _named(parser: str) -> Choice:
    return SWITCHED_OFF if parser in (NONE, "") else Choice(parser, by=OPERATOR)


def model_facts(path: str, template: str = "") -> ModelFacts:
    """Return the facts in a model's files.  `template`: the operator's chat template, a file or the text itself."""
    read = functools.partial(_read, path)
    config, tokenizer = _object(read("config.json")), read("tokenizer_config.json")
    settings = _object(tokenizer)
    inner = config.get("text_config")
    types = [config.get("model_type"), inner.get("model_type") if isinstance(inner, Mapping) else None]
    return ModelFacts(
        model_type=next((one for one in types if isinstance(one, str)), ""),
        template=_given(template) or _template(read, settings),
        tokens=tokenizer + read("tokenizer.json") + read("added_tokens.json"),
        has_response_template=isinstance(settings.get("response_template"), Mapping),
        has_mistral_tokenizer=bool(read("tekken.json")),
    )


def _given(template: str) -> str:
    try:
        return Path(template).read_text(encoding="utf-8") if template else ""
    except (OSError, ValueError):
        return template  # the text itself


def _template(read: Any, settings: Mapping[str, Any]) -> str:
    """Return the model's chat template; of several the one for tools, as transformers chooses it."""
    named = settings.get("chat_template")
    if isinstance(named, list):
        texts = {one.get("name"): one.get("template") for one in named if isinstance(one, Mapping)}
        named = texts.get("tool_use") or texts.get("default")
    found = read("chat_template.jinja") or named or _object(read("chat_template.json")).get("chat_template")
    return found if isinstance(found, str) else ""


def _read(path: str, name: str) -> str:
    """Return the text of one of the model's files; empty if it is not there."""
    file = Path(path).expanduser() / name if Path(path).expanduser().is_dir() else _from_hub(path, name)
    try:
        return file.read_text(encoding="utf-8") if file is not None else ""
    except (OSError, ValueError):
        return ""


def _from_hub(path: str, name: str) -> Path | None:
    """Return the copy of a file that was downloaded from the Hugging Face Hub; never ask the hub itself."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path.partition(":")[0], name)
    except HFValidationError:  # neither a directory nor a name: vLLM says so
        return None
    return Path(cached) if isinstance(cached, str) else None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
