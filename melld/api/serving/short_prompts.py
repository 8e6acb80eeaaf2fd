"""Tokenizes short prompts on the event loop: vLLM hands each to threads twice, which takes longer than the work itself.

vLLM's own synchronous functions do it, but call the core of the tokenizer where nothing is to be done around it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import TokenizersBackend
from vllm.renderers.base import BaseRenderer
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

SHORT = 2000
"""Maximum characters of a short prompt, before its template."""
MESSAGES = 20
_PLAIN_KEYS = {"role", "content"}


def at_once(kind: type[BaseRenderer]) -> type[BaseRenderer]:
    """Return a subclass of vLLM's renderer that handles short prompts synchronously."""

    class AtOnce(kind):  # type: ignore[misc]
        async def render_chat_async(
            self, conversations: Sequence[Any], chat_params: Any, *arguments: Any, **named: Any
        ) -> Any:
            given = chat_params.chat_template_kwargs.values()
            is_plain = all(value is None or isinstance(value, str | int) for value in given)
            if is_plain and _is_short(message for conversation in conversations for message in conversation):
                return self.render_chat(conversations, chat_params, *arguments, **named)
            return await super().render_chat_async(conversations, chat_params, *arguments, **named)

        async def render_cmpl_async(self, prompts: Sequence[Any], *arguments: Any, **named: Any) -> Any:
            are_texts = all(isinstance(prompt, dict) and prompt.keys() == {"prompt"} for prompt in prompts)
            if are_texts and _is_short({"content": prompt["prompt"]} for prompt in prompts):
                return self.render_cmpl(prompts, *arguments, **named)
            return await super().render_cmpl_async(prompts, *arguments, **named)

        def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
            asked = params.get_encode_kwargs()
            core = None if self._wants_offsets(prompt, params) else self._core
            if core is not None:
                tokens = core.encode(prompt["prompt"], add_special_tokens=asked["add_special_tokens"]).ids
                if not asked["truncation"] or len(tokens) <= asked["max_length"]:
                    return self._build_tokens_prompt(tokens, prompt)
            return super()._tokenize_prompt(prompt, params)

        @functools.cached_property
        def _core(self) -> Any:
            is_usual = kind._tokenize_prompt is BaseRenderer._tokenize_prompt  # noqa: SLF001  not a model's own
            return core_of(self.tokenizer) if is_usual else None

        get_eos_token_id = functools.cache(BaseRenderer.get_eos_token_id)  # it is looked up in the vocabulary

    return AtOnce


def core_of(tokenizer: Any) -> Any:
    """Return the core of a tokenizer that adds nothing to it but options that are off; None for any other."""
    if not isinstance(tokenizer, TokenizersBackend) or tokenizer.split_special_tokens:
        return None
    own: Any = next(one for one in type(tokenizer).__mro__ if not issubclass(one, ThreadSafeHFTokenizerMixin))
    steps = "__call__", "_encode_plus", "_switch_to_input_mode"
    if any(getattr(own, step, None) is not getattr(TokenizersBackend, step, None) for step in steps):
        return None
    core = tokenizer.backend_tokenizer
    return core if core.truncation is None and core.padding is None and not core.encode_special_tokens else None


def _is_short(messages: Iterable[Any]) -> bool:
    """Return True for a few messages with little text."""
    left, count = SHORT, 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or message.keys() - _PLAIN_KEYS:
            return False
        left, count = left - len(content), count + 1
    return left >= 0 and count <= MESSAGES
