"""A tiny Llama for trying melld without a download: random weights and a trained tokenizer.

Writes the files of a demo model's directory; `data/` holds those that never change.  Never imports torch or
transformers and never uses the network: its weights are numpy arrays written as safetensors, so the daemon may call
this too.  Answers end after 128 tokens, about a second: the random text has no natural end.

Its text is gibberish, but the rest is real: byte-level BPE, special tokens, a chat template with tools (calls in the
`<tool_call>` form of vLLM's `hermes` parser), grouped-query attention and rope.  The same seed gives the same bytes;
only the tokenizer also depends on the Python release, because it is trained on that release's language reference
(`pydoc_data`).
"""

import json
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from melld.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

VOCABULARY = 2048
"""Number of tokens, special tokens included."""

LAYERS = 4
HIDDEN = 256
INTERMEDIATE = 704
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = HIDDEN // HEADS

BEGIN, END, PAD, TURN_START, TURN_END = "<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BEGIN, END, PAD, TURN_START, TURN_END)
"""Ids 0 to 4, in this order; hidden from the text that a client sees."""

MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that stay visible in the text, where the tool and reasoning parsers look for them."""

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def make_demo_model(directory: Path, seed: int = 0) -> None:
    """Write the model into `directory` atomically; leave a complete model of this seed alone.

    Raises:
        ConfigError: `directory` holds something else, a demo model of another seed included.
    """
    if _is_complete(directory, seed):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays within one file system.
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write_files(scratch, seed)
        scratch.chmod(0o755)
        _move_into_place(scratch, directory, seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move_into_place(scratch: Path, directory: Path, seed: int) -> None:
    """Rename the finished directory, unless another process has put the same model there."""
    try:
        os.rename(scratch, directory)  # noqa: PTH104 - an empty directory may be replaced, anything else may not
    except OSError as error:
        if not _is_complete(directory, seed):
            raise ConfigError(str(directory), f"cannot create a demo model here: {error.strerror}") from error


def _is_complete(directory: Path, seed: int) -> bool:
    """Return True if `directory` holds the complete demo model of this seed."""
    if not all((directory / name).is_file() for name in FILES):
        return False
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(str(directory), f"config.json is damaged: {error}") from error
    found = config.get("melld_demo_seed")
    if found != seed:
        made_with = "is not a demo model" if found is None else f"was made with seed {found}"
        raise ConfigError(str(directory), f"contains a model that {made_with}: choose another directory")
    return True


def _write_files(directory: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    _write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(_model_config(seed), indent=2) + "\n")
    (directory / "generation_config.json").write_text(_data("generation_config.json"))
    save_file(_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it private; the service runs as another user


def _model_config(seed: int) -> dict[str, Any]:
    """Return the fields of transformers' LlamaConfig."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
    }
    return {**json.loads(_data("config.json")), **shape, "melld_demo_seed": seed}


def _weights(seed: int) -> "dict[str, np.ndarray]":
    """Return random float32 tensors under the names of transformers' LlamaForCausalLM, each [out, in].

    The scale makes the next token depend on its position and on distant tokens: with the usual small spread, greedy
    decoding soon repeats one word, and tests that compare texts would prove nothing.
    """
    import numpy as np

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> "np.ndarray":
        return (random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)).copy()

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_WIDTH, HIDDEN, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, HIDDEN, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, HIDDEN, 1.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_WIDTH, 1.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1.0),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1.0),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, 1.0),
        }
    weights["model.norm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    head = matrix(VOCABULARY, HIDDEN, 2.5)
    # Special tokens get a logit of 0: another token's is always larger, so a greedy answer never ends or opens a turn
    # by chance, and a sampled one rarely does.  Answers run to their max_tokens.
    head[: len(SPECIAL_TOKENS)] = 0.0
    weights["lm_head.weight"] = head
    return weights


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKER_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKER_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_data("chat_template.jinja"))
    (directory / "tokenizer_config.json").write_text(_data("tokenizer_config.json"))


def _training_text() -> list[str]:
    """Return Python's language reference (about 460 kB), plus samples of chat and JSON, which it lacks."""
    from pydoc_data.topics import topics

    shapes = ["system user assistant tool", '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'] * 20
    return [topics[name] for name in sorted(topics)] + shapes


def _data(name: str) -> str:
    """Return one of the model's files that are the same for every seed and shape, or the fixed part of it."""
    return files("melld").joinpath("data", name).read_text(encoding="utf-8")
