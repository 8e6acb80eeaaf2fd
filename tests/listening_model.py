"""A tiny model that takes audio in chats: the demo model's Llama as Qwen 2 Audio's, behind a random encoder."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import HEAD_WIDTH, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, make_demo_model
from tests.audio_model import sound
from tests.tiny_models import read_weights, write_weights

AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
WIDTH, INNER, ENCODER_LAYERS, ENCODER_HEADS, MELS, POSITIONS = 64, 128, 2, 2, 80, 1500


def make_listening_model(directory: Path) -> None:
    """Write the model into `directory`."""
    from tokenizers import AddedToken, Tokenizer

    make_demo_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in AUDIO_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_config(directory / "config.json")
    ear = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16_000}
    ear |= {"hop_length": 160, "chunk_length": 30, "n_fft": 400, "processor_class": "Qwen2AudioProcessor"}
    ear |= {"return_attention_mask": True}
    (directory / "preprocessor_config.json").write_text(json.dumps(ear))
    _write_weights(directory)


def spoken(seed: int) -> dict[str, Any]:
    """Return a part of a message: two seconds of tones, as OpenAI's clients send them."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(seed)).decode(), "format": "wav"}}


def _write_config(path: Path) -> None:
    text = json.loads(path.read_text())
    config: dict[str, Any] = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": VOCABULARY,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": text
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCABULARY + len(AUDIO_TOKENS)},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": MELS,
            "encoder_layers": ENCODER_LAYERS,
            "encoder_attention_heads": ENCODER_HEADS,
            "encoder_ffn_dim": INNER,
            "d_model": WIDTH,
            "max_source_positions": POSITIONS,
        },
    }
    path.write_text(json.dumps(config))


def _write_weights(directory: Path) -> None:
    weights = {f"language_model.{name}": weight for name, weight in read_weights(directory).items()}
    unheard = np.zeros((len(AUDIO_TOKENS), HIDDEN), dtype=np.float32)
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        weights[name] = np.concatenate((weights[name], unheard))
    for layer in range(LAYERS):  # Qwen's have biases
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            name = f"language_model.model.layers.{layer}.self_attn.{part}_proj.bias"
            weights[name] = np.zeros(rows * HEAD_WIDTH, dtype=np.float32)
    random = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        spread = 0.1 if len(shape) == 1 else 2.0 * float(np.prod(shape[1:])) ** -0.5
        weights[name] = random.standard_normal(shape, dtype=np.float32) * np.float32(spread)

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(WIDTH, dtype=np.float32)
        weights[f"{name}.bias"] = np.zeros(WIDTH, dtype=np.float32)

    for name, width in (("conv1", MELS), ("conv2", WIDTH)):
        add(f"audio_tower.{name}.weight", WIDTH, width, 3)
        add(f"audio_tower.{name}.bias", WIDTH)
    add("audio_tower.embed_positions.weight", POSITIONS, WIDTH)
    add_norm("audio_tower.layer_norm")
    for layer in range(ENCODER_LAYERS):
        prefix = f"audio_tower.layers.{layer}"
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            add_norm(f"{prefix}.{name}")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add(f"{prefix}.self_attn.{part}.weight", WIDTH, WIDTH)
            if part != "k_proj":
                add(f"{prefix}.self_attn.{part}.bias", WIDTH)
        for part, rows, columns in (("fc1", INNER, WIDTH), ("fc2", WIDTH, INNER)):
            add(f"{prefix}.{part}.weight", rows, columns)
            add(f"{prefix}.{part}.bias", rows)
    add("multi_modal_projector.linear.weight", HIDDEN, WIDTH)
    add("multi_modal_projector.linear.bias", HIDDEN)
    write_weights(directory, weights)
