"""Tiny models of the kinds that the demo model is not, each made of it or like it; seeded, so always the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import HIDDEN, make_demo_model


def make_reranker(directory: Path) -> None:
    """A model that scores pairs of texts: the demo model with a head for one class."""
    make_demo_model(directory)
    change_config(directory, architectures=["LlamaForSequenceClassification"], num_labels=1)
    head = np.random.default_rng(2).standard_normal((1, HIDDEN), dtype=np.float32) * np.float32(HIDDEN**-0.5)
    write_weights(directory, read_weights(directory) | {"score.weight": head})


def make_drafter(model: Path, directory: Path, layers: int) -> None:
    """A model that drafts for `model`: its first layers, so that it is often right and often wrong."""
    shutil.copytree(model, directory)
    change_config(directory, num_hidden_layers=layers)
    weights = read_weights(directory)
    write_weights(directory, {name: one for name, one in weights.items() if _layer_of(name) < layers})


def _layer_of(name: str) -> int:
    """Return the number of the layer that a weight is of; -1 for one of the whole model."""
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
