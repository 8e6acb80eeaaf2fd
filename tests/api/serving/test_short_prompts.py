"""Which prompts are tokenized on the event loop."""

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from melld.api.serving.short_prompts import MESSAGES, SHORT, at_once, core_of


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


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    """A tokenizer as vLLM's renderers have it."""
    cached = get_cached_tokenizer(AutoTokenizer.from_pretrained(demo_model))
    return maybe_make_thread_pool(cached)


@pytest.mark.parametrize("text", ["", "Hello", "<|im_start|>user\nNaïve 🙂 \ud7ff<|im_end|>", "a b " * 30])
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(("most", "kept"), [(1000, None), (1, None), (1000, 3), (20, -1)])
def test_short_prompts_have_vllm_s_tokens(
    tokenizer: Any, text: str, is_special: bool, most: int, kept: int | None
) -> None:
    """Whatever the request says about special tokens and truncation."""
    params = TokenizeParams(most, add_special_tokens=is_special, truncate_prompt_tokens=None if most < 3 else kept)
    made = []
    kinds: list[Any] = [HfRenderer, at_once(HfRenderer)]
    for kind in kinds:
        renderer = kind.__new__(kind)
        renderer.tokenizer = tokenizer
        made.append((renderer._tokenize_prompt({"prompt": text}, params), renderer.get_eos_token_id()))
    assert made[1] == made[0]


def test_a_tokenizer_that_does_more_than_its_core_is_called_whole(demo_model: Path) -> None:
    """A class of its own, or one that is to pad, may make other tokens."""

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments: Any, **named: Any) -> Any:
            return super()._encode_plus(*arguments, **named)

    plain = AutoTokenizer.from_pretrained(demo_model)
    padding = copy.deepcopy(plain)
    padding.backend_tokenizer.enable_padding(length=8)
    splitting = copy.deepcopy(plain)
    splitting.split_special_tokens = True
    own = Own.from_pretrained(demo_model)
    tokenizers = plain, padding, splitting, own, maybe_make_thread_pool(own), None
    assert [core_of(one) is not None for one in tokenizers] == [True, False, False, False, False, False]
