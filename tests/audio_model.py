"""A tiny audio model: a random Whisper that takes three seconds at a time, with the demo model's tokenizer."""

import importlib.util
import io
import json
import runpy
import wave
from pathlib import Path

import numpy as np

from melld.demo_model import VOCABULARY
from tests.small_model import make_small_model

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 128, 256, 2, 2
SECONDS, RATE, HOP, MELS = 3, 16_000, 160, 80
HEARD_TOKENS = SECONDS * RATE // HOP // 2
"""Of one piece of audio, however short: what the encoder makes of it."""
MOST_TOKENS = 448
MARKS = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|prev|>", "<|notimestamps|>")
TIMES = tuple(f"<|{hundredths / 100:.2f}|>" for hundredths in range(0, 100 * SECONDS + 1, 2))


def make_hearing_model(directory: Path) -> None:
    """Write the model into `directory`."""
    make_small_model(directory)
    marks, vocabulary = _add_tokens(directory / "tokenizer.json")
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": vocabulary,
        "d_model": HIDDEN,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": INTERMEDIATE,
        "decoder_ffn_dim": INTERMEDIATE,
        "num_mel_bins": MELS,
        "max_source_positions": HEARD_TOKENS,
        "max_target_positions": MOST_TOKENS,
        "decoder_start_token_id": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    ear = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": RATE}
    ear |= {"hop_length": HOP, "chunk_length": SECONDS, "n_fft": 400, "processor_class": "WhisperProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(ear))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "chat_template.jinja").unlink()
    _write_weights(directory / "model.safetensors", marks, vocabulary)


def sound(seed: int, seconds: float = 2.0) -> bytes:
    """Return a WAV file of a few tones."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * times * (1 + times)) for pitch in random.uniform(100, 4000, 4))
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes((tones * 6000).astype("<i2").tobytes())
    return file.getvalue()


def _add_tokens(path: Path) -> tuple[int, int]:
    """Add Whisper's tokens; return how many are markers and languages, and the vocabulary size."""
    from tokenizers import AddedToken, Tokenizer

    languages = [f"<|{code}|>" for code in _language_codes()]
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in (*MARKS, *languages)])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in TIMES])
    tokenizer.save(str(path))
    return len(MARKS) + len(languages), tokenizer.get_vocab_size()


def _language_codes() -> list[str]:
    """Return the languages that vLLM knows, read from its file, as importing it takes seconds."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "model_executor" / "models" / "whisper_utils.py"
    return list(runpy.run_path(str(file))["ISO639_1_SUPPORTED_LANGS"])


def _write_weights(path: Path, marks: int, vocabulary: int) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(1)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, gain: float = 1.0) -> None:
        spread = gain if len(shape) == 1 else gain * float(np.prod(shape[1:])) ** -0.5
        weights[name] = random.standard_normal(shape, dtype=np.float32) * np.float32(spread)

    def add_norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights[f"{name}.bias"] = np.zeros(HIDDEN, dtype=np.float32)

    for name, width in (("conv1", MELS), ("conv2", HIDDEN)):
        add(f"model.encoder.{name}.weight", HIDDEN, width, 3, gain=2.0)
        add(f"model.encoder.{name}.bias", HIDDEN, gain=0.1)
    add("model.encoder.embed_positions.weight", HEARD_TOKENS, HIDDEN, gain=HIDDEN**0.5)
    add("model.decoder.embed_positions.weight", MOST_TOKENS, HIDDEN, gain=HIDDEN**0.5)
    # The head is the embedding.  Small, so that a token does not lead to itself; the marks' are smaller still, so that
    # none of them ends a text or stands in it, and of the languages it is the audio that chooses.
    add("model.decoder.embed_tokens.weight", vocabulary, HIDDEN, gain=HIDDEN**0.5 / 10)
    embedding = weights["model.decoder.embed_tokens.weight"]
    embedding[:5] = 0.0
    embedding[VOCABULARY : VOCABULARY + marks] /= 10
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        add_norm(f"model.{side}.layer_norm")
        for layer in range(LAYERS):
            prefix = f"model.{side}.layers.{layer}"
            for attention in attentions:
                add_norm(f"{prefix}.{attention}_layer_norm")
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    add(f"{prefix}.{attention}.{part}.weight", HIDDEN, HIDDEN, gain=2.0)
                    if part != "k_proj":
                        add(f"{prefix}.{attention}.{part}.bias", HIDDEN, gain=0.1)
            add_norm(f"{prefix}.final_layer_norm")
            for part, rows, columns in (("fc1", INTERMEDIATE, HIDDEN), ("fc2", HIDDEN, INTERMEDIATE)):
                add(f"{prefix}.{part}.weight", rows, columns)
                add(f"{prefix}.{part}.bias", rows, gain=0.1)
    save_file(weights, path, metadata={"format": "pt"})
