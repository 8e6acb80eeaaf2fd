"""On what the benchmarks of a daemon run: CPU devices with the demo model, or one GPU with a model of a usual size.

Owns the model, and the words that melld and `vllm serve` are both given.  On a GPU the weights are made up by vLLM
(`load_format = "dummy"`, the same in every process): nothing is downloaded, and the work is that of a real model.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from melld.demo_model import make_demo_model

GPU_MODEL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B, with the demo model's vocabulary: 128 KiB of KV a token, 14 GB of weights."""


@dataclass(frozen=True)
class Setting:
    """One kind of device."""

    kind: str
    devices: Callable[[int], tuple[str, ...]]
    """Flags of `melld serve` for so many workers."""
    kv_bytes: int
    """Of each worker."""
    engine: dict[str, Any]
    """Options of vLLM's engine, for melld and `vllm serve` alike."""
    shape: dict[str, Any] = field(default_factory=dict)
    """What the model's configuration has otherwise than the demo model's."""

    def make_model(self, directory: Path) -> None:
        """Write the model; one of another shape has no weights of its own."""
        make_demo_model(directory)
        if self.shape:
            path = directory / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | self.shape))
            for weights in directory.glob("*.safetensors"):
                weights.unlink()

    def serve_flags(self, workers: int) -> tuple[str, ...]:
        """Return the flags of `melld serve`: devices, memory, options; all workers in use, all the time."""
        options = self.engine | ({"kv_cache_memory_bytes": self.kv_bytes} if self.kind == "cuda" else {})
        words = [word for key, value in options.items() for word in ("--set", f"model.vllm.{key}={toml(value)}")]
        spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
        return (*self.devices(workers), *words, *spread)

    def vllm_words(self) -> list[str]:
        """Return the same for `vllm serve`."""
        words = ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        for key, value in self.engine.items():
            flag = f"--{key.replace('_', '-')}"
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [flag] if value is True else [flag, text]
        return words


def toml(value: Any) -> str:
    """Return a value of a configuration."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _cpu_devices(workers: int) -> tuple[str, ...]:
    return ("--device", f"cpu:{workers}", "--kv-bytes", str(CPU.kv_bytes))


def _one_gpu(workers: int) -> tuple[str, ...]:
    return ("--set", f"devices.cuda={[0] * workers}")


CPU = Setting(
    kind="cpu",
    devices=_cpu_devices,
    kv_bytes=192 << 20,  # 49,152 tokens of the demo model, whose own limit is 32,768
    engine={"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 64},
)
CUDA = Setting(
    kind="cuda",
    devices=_one_gpu,
    kv_bytes=8 << 30,  # 65,536 tokens
    engine={
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 32768,
        # The other server, or another two workers, are on the GPU too: vLLM looks for so much free memory at its start.
        "gpu_memory_utilization": 0.25,
        # CUDA graphs for decoding, no torch.compile: two workers are ready within a minute on a machine that is new.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
    shape=GPU_MODEL,
)
SETTINGS = {setting.kind: setting for setting in (CPU, CUDA)}
