"""Tiny models of the kinds that the demo model is not, each made of it or like it; seeded, so always the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import HEAD_WIDTH, HEADS, HIDDEN, LAYERS, make_demo_model

WINDOW = 64


def make_reranker(directory: Path) -> None:
    """A model that scores pairs of texts: the demo model with a head for one class."""
    make_demo_model(directory)
    change_config(directory, architectures=["LlamaForSequenceClassification"], num_labels=1)
    head = np.random.default_rng(2).standard_normal((1, HIDDEN), dtype=np.float32) * np.float32(HIDDEN**-0.5)
    write_weights(directory, read_weights(directory) | {"score.weight": head})


def make_drafter(model: Path, directory: Path, layers: int) -> None:
    """A model that drafts for `model`: its first layers, a little weaker, so that it is often right and often wrong."""
    shutil.copytree(model, directory)
    change_config(directory, num_hidden_layers=layers)
    weights = read_weights(directory)
    kept = {name: one for name, one in weights.items() if _layer_of(name) < layers}
    write_weights(directory, {name: one * np.float32(0.6 if "down_proj" in name else 1) for name, one in kept.items()})


def make_eagle(model: Path, directory: Path) -> None:
    """An EAGLE head for `model`: its first layer, which reads a token and half of the model's own state."""
    make_drafter(model, directory, 1)
    layer = {name.removeprefix("model."): one for name, one in read_weights(directory).items() if _layer_of(name) == 0}
    unchanged = np.eye(len(layer.pop("layers.0.input_layernorm.weight")), dtype=np.float32)
    write_weights(directory, layer | {"fc.weight": np.concatenate((unchanged, unchanged / 2), axis=1)})


def make_windowed(directory: Path) -> None:
    """A Gemma 3: two layers see the last 64 tokens, one sees all, and the text depends on both."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    layers = len(kinds)
    make_demo_model(directory)
    weights = {
        name: one for name, one in read_weights(directory).items() if "norm" not in name and _layer_of(name) < layers
    }
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * np.float32(HIDDEN**-0.5)
    zeros = np.zeros(HIDDEN, dtype=np.float32)  # a norm of Gemma's multiplies by one more than its weight
    weights["model.norm.weight"] = zeros
    for layer in range(layers):
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"model.layers.{layer}.{norm}_layernorm.weight"] = zeros
        for norm in ("q", "k"):
            weights[f"model.layers.{layer}.self_attn.{norm}_norm.weight"] = zeros[:HEAD_WIDTH]
    write_weights(directory, weights)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    change_config(
        directory,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=layers,
        layer_types=kinds,
        sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_WIDTH,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), rope),
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
    )


def make_latent(directory: Path) -> None:
    """A DeepSeek V2 without experts: its KV is one latent vector a token, and the demo model's rest."""
    latent, rope, part = 512, 64, HEAD_WIDTH
    make_demo_model(directory)
    random = np.random.default_rng(4)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain * columns**-0.5)

    weights = {name: one for name, one in read_weights(directory).items() if "self_attn" not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        weights |= {
            f"{prefix}.q_proj.weight": matrix(HEADS * (part + rope), HIDDEN, 1.5),
            f"{prefix}.kv_a_proj_with_mqa.weight": matrix(latent + rope, HIDDEN, 1.5),
            f"{prefix}.kv_a_layernorm.weight": np.ones(latent, dtype=np.float32),
            f"{prefix}.kv_b_proj.weight": matrix(HEADS * 2 * part, latent, 1.5),
            f"{prefix}.o_proj.weight": matrix(HIDDEN, HEADS * part),
        }
    write_weights(directory, weights)
    change_config(
        directory,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_key_value_heads=HEADS,
        head_dim=rope,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=part,
        v_head_dim=part,
        first_k_dense_replace=LAYERS,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=HIDDEN,
    )


def make_adapter(model: Path, directory: Path, seed: int, rank: int = 8) -> None:
    """A LoRA adapter of `model`, strong enough to change most tokens."""
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
