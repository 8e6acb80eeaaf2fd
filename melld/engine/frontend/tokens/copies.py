"""Copies of a tokenizer that share its vocabulary.

vLLM gives each of a front end's threads a copy of its own, since a tokenizer cannot be used by two at once.  Its copies
are complete: with 150,000 tokens they take over a second of the interpreter, in which nothing else of the process runs,
and 120 MB.  These take 3 ms: the tables are the same objects, which a tokenizer never changes once it is loaded.
"""

import copy
from typing import Any

from tokenizers import Tokenizer
from vllm.multimodal.processing.processor import cached_encode
from vllm.tokenizers import cached_get_tokenizer, hf
from vllm.transformers_utils import processor
from vllm.utils import func_utils

made_by_vllm = hf.get_cached_tokenizer


def twin(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return one with the same tables and settings, or None if it would not know the same added tokens."""
    found = Tokenizer(tokenizer.model)
    found.normalizer, found.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    found.post_processor, found.decoder = tokenizer.post_processor, tokenizer.decoder
    added = tokenizer.get_added_tokens_decoder()
    found.add_tokens([added[token] for token in sorted(added)])
    found.encode_special_tokens = tokenizer.encode_special_tokens
    if tokenizer.truncation is not None:
        found.enable_truncation(**tokenizer.truncation)
    if tokenizer.padding is not None:
        found.enable_padding(**tokenizer.padding)
    return found if repr(found.get_added_tokens_decoder()) == repr(added) else None


def with_cheap_copies(tokenizer: Any) -> Any:
    """Return what vLLM makes of transformers' tokenizer; `copy.copy` and `copy.deepcopy` of it copy no table."""
    cached = made_by_vllm(tokenizer)
    kind: Any = type(cached)
    kind.__copy__ = _alike
    if isinstance(getattr(cached, "_tokenizer", None), Tokenizer) and twin(cached._tokenizer) is not None:  # noqa: SLF001
        kind.__deepcopy__ = _independent
    return cached


def _alike(tokenizer: Any) -> Any:
    found = object.__new__(type(tokenizer))
    found.__dict__ |= tokenizer.__dict__
    return found


def _independent(tokenizer: Any, _copied: dict[int, Any]) -> Any:
    found = _alike(tokenizer)
    for name, value in tokenizer.__dict__.items():
        if isinstance(value, dict | list):
            found.__dict__[name] = copy.copy(value)
    core = tokenizer._tokenizer  # noqa: SLF001
    found._tokenizer = twin(core) or copy.deepcopy(core)  # noqa: SLF001
    return found


def forget_tokenizers() -> None:
    """Empty vLLM's caches that keep tokenizers: one of a model that has gone would stay until many more have come."""
    caches = (cached_get_tokenizer, cached_encode, processor.cached_get_processor, processor.get_processor_kwargs_type)
    for cache in (*caches, func_utils._supports_kw):  # noqa: SLF001
        cache.cache_clear()


hf.get_cached_tokenizer = with_cheap_copies
