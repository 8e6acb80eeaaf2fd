"""Catalogue of models and cards, and the arithmetic of a card's memory for KV blocks.

Owns published facts: sizes of weights, KV bytes per token, memory of a card.  Never measures and never asks a device:
the daemon's own profile does.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from melld.config_values import parse_bytes
from melld.errors import ConfigError

GIB = 2**30
BLOCK_TOKENS = 16
MEMORY_UTILISATION = 0.9  # vLLM's default gpu_memory_utilization
ACTIVATION_BYTES = 1 * GIB  # what vLLM's profiling run finds for models of this size, roughly
HALF_PRECISION_BYTES = 2


class Model(msgspec.Struct, frozen=True):
    """A model's size.  `bytes_per_token`: keys and values of all layers, in half precision."""

    name: str
    parameters: int
    bytes_per_token: int

    @property
    def weight_bytes(self) -> int:
        """Return the memory of the weights in half precision."""
        return self.parameters * HALF_PRECISION_BYTES


class Card(msgspec.Struct, frozen=True):
    """A GPU as its maker describes it: memory, memory bandwidth, dense half precision arithmetic."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    operations_per_s: float


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("llama-2-7b", 6_738_415_616, 524_288),
        Model("llama-2-13b", 13_015_864_320, 819_200),
        Model("llama-3.1-8b", 8_030_261_248, 131_072),
        Model("mistral-7b", 7_248_023_552, 131_072),
        Model("opt-13b", 12_853_473_280, 819_200),
        Model("qwen2.5-7b", 7_615_616_512, 57_344),
    )
}
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card("a100-40g", 40 * GIB, 1.555e12, 312e12),
        Card("a100-80g", 80 * GIB, 2.039e12, 312e12),
        Card("rtx-4090", 24 * GIB, 1.008e12, 165e12),
        Card("l4", 24 * GIB, 0.300e12, 121e12),
        Card("h100-80g", 80 * GIB, 3.35e12, 989e12),
        Card("h200-141g", 141 * GIB, 4.8e12, 989e12),
    )
}


def model_by_name(name: str) -> Model:
    """Return the named model, or the one that a `config.json` (its path, or its folder's) describes.

    Raises:
        ConfigError: no such name or file, or the file does not describe a decoder.
    """
    if name in MODELS:
        return MODELS[name]
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError("--model", f"{name!r} is neither a known model ({', '.join(MODELS)}) nor a config.json")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        return model_from_config(path.parent.name or "model", described)
    except (KeyError, TypeError, ValueError, ArithmeticError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"does not describe a decoder model: {error!r}") from error


def model_from_config(name: str, config: Mapping[str, Any]) -> Model:
    """Return the model of a Hugging Face `config.json` (gated MLP, half precision)."""
    hidden, layers, heads = (
        int(config["hidden_size"]),
        int(config["num_hidden_layers"]),
        int(config["num_attention_heads"]),
    )
    if heads <= 0:
        raise ValueError("no attention heads")
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * int(config["intermediate_size"])
    embeddings = (1 if config.get("tie_word_embeddings") else 2) * int(config["vocab_size"]) * hidden
    bytes_per_token = 2 * layers * kv_heads * head_dim * HALF_PRECISION_BYTES
    if bytes_per_token <= 0:
        raise ValueError("no keys and values")
    return Model(name, layers * (attention + mlp + 2 * hidden) + embeddings + hidden, bytes_per_token)


def card_by_name(name: str) -> Card:
    """Return the named card, or one of the given memory (`24GiB`) with an A100's speed.

    Raises:
        ConfigError: neither a known card nor a size.
    """
    if name in CARDS:
        return CARDS[name]
    try:
        memory_bytes = parse_bytes(name, "--gpu")
    except ConfigError:
        raise ConfigError("--gpu", f"{name!r} is neither a known card ({', '.join(CARDS)}) nor a size") from None
    return Card(name, memory_bytes, CARDS["a100-40g"].bytes_per_s, CARDS["a100-40g"].operations_per_s)


def kv_capacity_bytes(model: Model, card: Card) -> int:
    """Return the bytes of whole KV blocks that fit beside a worker's weights and activations.

    Raises:
        ConfigError: the weights alone do not leave room for a single block.
    """
    free_bytes = int(card.memory_bytes * MEMORY_UTILISATION) - model.weight_bytes - ACTIVATION_BYTES
    block_bytes = BLOCK_TOKENS * model.bytes_per_token
    if free_bytes < block_bytes:
        raise ConfigError("--gpu", f"{model.name} does not fit on {card.name}")
    return free_bytes // block_bytes * block_bytes
