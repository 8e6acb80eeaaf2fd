"""A tiny model that sees: the demo model's Llama behind a random vision tower, as Idefics3 puts them together.

Idefics3, because its image processor needs no torchvision, which vLLM's CPU build does not bring.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from melld.demo_model import VOCABULARY
from tests.small_model import HIDDEN, make_small_model

IMAGE_TOKEN = "<image>"  # noqa: S105  no password
IMAGE_TOKENS = ("<fake_token_around_image>", IMAGE_TOKEN, "<end_of_utterance>", "<global-img>")
IMAGE_PIXELS, PATCH_PIXELS, SCALE = 56, 7, 2
TOKENS_PER_IMAGE = (IMAGE_PIXELS // PATCH_PIXELS) ** 2 // SCALE**2
VISION_HIDDEN, VISION_INTERMEDIATE, VISION_LAYERS, VISION_HEADS = 64, 128, 2, 2


def make_vision_model(directory: Path) -> None:
    """Write the model into `directory`."""
    make_small_model(directory)
    _add_tokens(directory / "tokenizer.json")
    _write_config(directory / "config.json")
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_PIXELS},
        "max_image_size": {"longest_edge": IMAGE_PIXELS},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": TOKENS_PER_IMAGE}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    _write_weights(directory / "model.safetensors")


def picture(seed: int) -> str:
    """Return a picture of noise, as the URL that a client sends."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _add_tokens(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in IMAGE_TOKENS])
    tokenizer.save(str(path))


def _write_config(path: Path) -> None:
    text = json.loads(path.read_text())
    config: dict[str, Any] = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": VOCABULARY + IMAGE_TOKENS.index(IMAGE_TOKEN),
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": text | {"vocab_size": VOCABULARY + len(IMAGE_TOKENS)},
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_INTERMEDIATE,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": VISION_HEADS,
            "image_size": IMAGE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
    }
    path.write_text(json.dumps(config))


def _write_weights(path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    text = load_file(path)
    weights = {name.replace("model.", "model.text_model.", 1): weight for name, weight in text.items()}
    unseen = np.zeros((len(IMAGE_TOKENS), HIDDEN), dtype=np.float32)
    for name in ("model.text_model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.concatenate((weights[name], unseen))
    random = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        spread = 1.0 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5
        weights[name] = random.standard_normal(shape, dtype=np.float32) * np.float32(spread)

    vision = "model.vision_model"
    add(f"{vision}.embeddings.patch_embedding.weight", VISION_HIDDEN, 3, PATCH_PIXELS, PATCH_PIXELS)
    add(f"{vision}.embeddings.patch_embedding.bias", VISION_HIDDEN)
    add(f"{vision}.embeddings.position_embedding.weight", (IMAGE_PIXELS // PATCH_PIXELS) ** 2, VISION_HIDDEN)
    for layer in range(VISION_LAYERS):
        prefix = f"{vision}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add(f"{prefix}.self_attn.{part}.weight", VISION_HIDDEN, VISION_HIDDEN)
            add(f"{prefix}.self_attn.{part}.bias", VISION_HIDDEN)
        add(f"{prefix}.mlp.fc1.weight", VISION_INTERMEDIATE, VISION_HIDDEN)
        add(f"{prefix}.mlp.fc1.bias", VISION_INTERMEDIATE)
        add(f"{prefix}.mlp.fc2.weight", VISION_HIDDEN, VISION_INTERMEDIATE)
        add(f"{prefix}.mlp.fc2.bias", VISION_HIDDEN)
        for part in ("layer_norm1", "layer_norm2"):
            add(f"{prefix}.{part}.weight", VISION_HIDDEN)
            add(f"{prefix}.{part}.bias", VISION_HIDDEN)
    add(f"{vision}.post_layernorm.weight", VISION_HIDDEN)
    add(f"{vision}.post_layernorm.bias", VISION_HIDDEN)
    add("model.connector.modality_projection.proj.weight", HIDDEN, VISION_HIDDEN * SCALE**2)
    save_file(weights, path, metadata={"format": "pt"})
