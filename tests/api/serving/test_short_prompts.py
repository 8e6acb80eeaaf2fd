"""Which prompts are tokenized on the event loop."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from melld.api.serving.short_prompts import MESSAGES, SHORT, at_once


class Renderer:
    """vLLM's renderer, as far as it matters here: threaded and inline."""

    def render_chat(self, *_: Any) -> str:
        return "at once"

    async def render_chat_async(self, *_: Any) -> str:
        return "in threads"

    render_cmpl, render_cmpl_async = render_chat, render_chat_async


SAID = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("conversation", "given", "way"),
    [
        ([SAID], {"tools": None, "tokenize": False}, "at once"),
        ([SAID] * (MESSAGES + 1), {}, "in threads"),
        ([SAID | {"content": "a" * (SHORT + 1)}], {}, "in threads"),
        ([SAID | {"content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}], {}, "in threads"),
        ([SAID | {"tool_calls": [{}]}], {}, "in threads"),
        ([SAID], {"tools": [{"type": "function"}]}, "in threads"),
    ],
)
def test_only_quick_prompts_are_tokenized_on_the_loop(conversation: list[Any], given: dict[str, Any], way: str) -> None:
    """Fetching images and tokenizing long texts or tool lists takes time: other streams go on meanwhile."""
    renderer = at_once(Renderer)()
    params = SimpleNamespace(chat_template_kwargs=given)
    assert asyncio.run(renderer.render_chat_async([conversation], params)) == way


@pytest.mark.parametrize(
    ("prompts", "way"),
    [
        ([{"prompt": "Hello"}], "at once"),
        ([{"prompt": "a" * SHORT}, {"prompt": "a"}], "in threads"),
        ([{"prompt_token_ids": [1]}], "in threads"),
        ([b"embeddings"], "in threads"),
    ],
)
def test_only_short_text_completions_are_tokenized_on_the_loop(prompts: list[Any], way: str) -> None:
    """Embeddings have to be loaded, for one."""
    assert asyncio.run(at_once(Renderer)().render_cmpl_async(prompts)) == way
