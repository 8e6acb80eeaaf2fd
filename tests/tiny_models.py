"""Tiny models of the kinds that the demo model is not, each made of it or like it; seeded, so always the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import HIDDEN, make_demo_model


def make_reranker(directory: Path) -> None:
    """A model that scores pairs of texts: the demo model with a head for one class."""
    make_demo_model(directory)
    change_config(directory, architectures=["LlamaForSequenceClassification"], num_labels=1)
    head = np.random.default_rng(2).standard_normal((1, HIDDEN), dtype=np.float32) * np.float32(HIDDEN**-0.5)
    add_weights(directory, {"score.weight": head})


def change_config(directory: Path, **fields: Any) -> None:
    """Write these fields into the model's `config.json`."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def add_weights(directory: Path, weights: dict[str, Any]) -> None:
    """Add these to the model's weights."""
    from safetensors.numpy import load_file, save_file

    path = directory / "model.safetensors"
    save_file(load_file(path) | weights, path, metadata={"format": "pt"})
