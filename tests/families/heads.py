"""Families whose models bring a draft head (MTP): a layer like their last, which reads a token and a state."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.family import HIDDEN, Family
from tests.families.texts import TEXTS
from tests.tiny_models import read_weights, write_weights

DRAFTED = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "max_model_len": 2048}
UNCHANGED = np.eye(HIDDEN, dtype=np.float32)
READS_BOTH = np.concatenate((UNCHANGED, UNCHANGED / 2), axis=1)


def add_numbered(directory: Path, layers: int, modules: int = 1) -> None:
    """Add the head as the layer after the last, as in GLM and DeepSeek, or several, all alike."""
    weights = read_weights(directory)
    head = _layer(weights, layers - 1)
    one = np.ones(HIDDEN, dtype=np.float32)
    head |= {"enorm.weight": one, "hnorm.weight": one, "eh_proj.weight": READS_BOTH, "shared_head.norm.weight": one}
    head |= {"shared_head.head.weight": weights["lm_head.weight"]}
    head |= {"embed_tokens.weight": weights["model.embed_tokens.weight"]}
    for number in range(layers, layers + modules):
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in head.items()}
    write_weights(directory, weights)


def add_named(directory: Path, layers: int) -> None:
    """Add the head under its own name, as in Qwen; one of its norms multiplies by one plus its weight."""
    weights = read_weights(directory)
    zero = np.zeros(HIDDEN, dtype=np.float32)
    head = {f"layers.0.{name}": weight for name, weight in _layer(weights, layers - 1).items()}
    head |= dict.fromkeys(("pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight", "norm.weight"), zero)
    head |= {"fc.weight": READS_BOTH}
    write_weights(directory, weights | {f"mtp.{name}": weight for name, weight in head.items()})


def _layer(weights: dict[str, Any], number: int) -> dict[str, Any]:
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _with_head(name: str, add: Any, **options: Any) -> Family:
    family = TEXTS[name]
    return family._replace(
        written={**family.written, "num_nextn_predict_layers": 1},
        options={**family.options, **DRAFTED, **options},
        finish=functools.partial(add, layers=family.fields["num_hidden_layers"]),
    )


TWO_MODULES = _with_head("glm4_moe", functools.partial(add_numbered, modules=2))
TWO_MODULES = TWO_MODULES._replace(written=TWO_MODULES.written | {"num_nextn_predict_layers": 2})
"""The second reads one token further ahead."""
HEADS = {
    "glm4_moe_mtp": _with_head("glm4_moe", add_numbered),
    "deepseek_v3_mtp": _with_head("deepseek_v3", add_numbered, max_num_batched_tokens=2048),  # prompts are not cut
    "qwen3_next_mtp": _with_head("qwen3_next", add_named),
}
