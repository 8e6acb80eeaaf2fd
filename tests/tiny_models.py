"""Tiny models of other kinds than the demo model, each derived from it or like it; seeded, so always the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import HEAD_WIDTH
from tests.small_model import HIDDEN, make_small_model


def make_reranker(directory: Path) -> None:
    """Write a model that scores pairs of texts: the demo model with a head for one class."""
    make_small_model(directory)
    change_config(directory, architectures=["LlamaForSequenceClassification"], num_labels=1)
    head = np.random.default_rng(2).standard_normal((1, HIDDEN), dtype=np.float32) * np.float32(HIDDEN**-0.5)
    write_weights(directory, read_weights(directory) | {"score.weight": head})


def make_drafter(model: Path, directory: Path, layers: int) -> None:
    """Write a draft model for `model`: its first layers, a little weaker, so that it is often right and often wrong."""
    shutil.copytree(model, directory)
    change_config(directory, num_hidden_layers=layers)
    weights = read_weights(directory)
    kept = {name: one for name, one in weights.items() if _layer_of(name) < layers}
    write_weights(directory, {name: one * np.float32(0.6 if "down_proj" in name else 1) for name, one in kept.items()})


def make_eagle(model: Path, directory: Path) -> None:
    """Write an EAGLE head for `model`: its first layer, which reads a token and half of the model's own state."""
    make_drafter(model, directory, 1)
    layer = {name.removeprefix("model."): one for name, one in read_weights(directory).items() if _layer_of(name) == 0}
    unchanged = np.eye(len(layer.pop("layers.0.input_layernorm.weight")), dtype=np.float32)
    write_weights(directory, layer | {"fc.weight": np.concatenate((unchanged, unchanged / 2), axis=1)})


def make_adapter(model: Path, directory: Path, seed: int, rank: int = 8) -> None:
    """Write a LoRA adapter of `model`, strong enough to change most tokens."""
    from safetensors.numpy import save_file

    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in (("q_proj", heads * HEAD_WIDTH), ("v_proj", kv_heads * HEAD_WIDTH)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, hidden)), ("B", (rows, rank))):
                weight = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
                weights[f"{prefix}.lora_{part}.weight"] = weight
    save_file(weights, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": "demo"}))


def _layer_of(name: str) -> int:
    """Return the number of a weight's layer; -1 for one of the whole model."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def change_config(directory: Path, **fields: Any) -> None:
    """Write these fields into the model's `config.json`."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read_weights(directory: Path) -> dict[str, Any]:
    """Return the model's weights by name."""
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def write_weights(directory: Path, weights: dict[str, Any]) -> None:
    """Give the model these weights."""
    from safetensors.numpy import save_file

    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
