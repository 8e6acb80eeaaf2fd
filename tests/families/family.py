"""A model family as the tests see it, and how a tiny model of it is made: random, seeded, float32.

Its shape is the real one in small: the same pattern of layers, windows, states, heads and experts.  Its weights are
spread so that the next token depends on distant ones, as the demo model's are: else tests that compare texts would
prove nothing.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from melld.demo_model import SPECIAL_TOKENS, VOCABULARY, make_demo_model

HIDDEN, HEADS, KV_HEADS, HEAD_WIDTH, CONTEXT_TOKENS = 128, 4, 2, 32, 16384
WINDOW, CHUNK = 64, 128
"""How many tokens the layers with windows see, and those of chunked attention: a test passes them in a few steps."""
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "max_position_embeddings": CONTEXT_TOKENS,
}
"""What every configuration begins with."""


class Family(NamedTuple):
    """A kind of model: transformers' names, and the configuration fields that give its shape."""

    config: str
    """The name of its configuration in transformers, without `Config`."""
    model: str
    """Its class there, by which vLLM knows it too."""
    fields: Mapping[str, Any] = {}
    """Beside `COMMON`; None takes one away."""
    written: Mapping[str, Any] = {}
    """What `config.json` says otherwise, or beside."""
    options: Mapping[str, Any] = {}
    """vLLM's options that it is served with."""
    spread: float = 0.3
    """Of an embedding that is the head too: it leads each token to itself, unless the layers are louder."""
    finish: Callable[[Path], None] | None = None
    """What is still to be done in the finished directory."""


def make_family(family: Family, directory: Path) -> None:
    """Write a tiny model of the family into `directory`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given = {key: value for key, value in {**COMMON, **family.fields}.items() if value is not None}
    config = getattr(transformers, f"{family.config}Config")(**given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, family.model)(config).float()
        _spread(model, family.spread if config.tie_word_embeddings else 1.0)
    shutil.copytree(_demo_model(), directory, dirs_exist_ok=True)
    for unneeded in ("config.json", "model.safetensors"):
        (directory / unneeded).unlink()
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"} | family.written))
    if family.finish:
        family.finish(directory)


@functools.cache
def _demo_model() -> Path:
    """Return a demo model, whose tokenizer and chat template all families share; it lasts as long as this process."""
    directory = Path(_scratch().name) / "demo"
    make_demo_model(directory)
    return directory


@functools.cache
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


def _spread(model: Any, of_embedding: float) -> None:
    """Fill every matrix with random numbers large enough to matter; norms, biases and decays are unchanged."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or name.endswith(("A_log", "_scale", "dt_bias")):
                continue
            if name.endswith("conv1d.weight"):  # one row a channel
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif "embed" in name:
                weight.normal_(0, of_embedding)
            else:
                loud = 2.5 if name.endswith("lm_head.weight") else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(0, loud * weight[0].numel() ** -0.5 if weight.dim() != 3 else weight.shape[-1] ** -0.5)
        if head := getattr(model, "lm_head", None):
            head.weight[: len(SPECIAL_TOKENS)] = 0.0  # no answer ends by chance: see the demo model
