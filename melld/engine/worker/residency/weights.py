"""Releases an engine's weights, and restores them.

CPU    freed, and read again from the model's files: where vLLM's layers keep them is known here, in parameters, and
packed for oneDNN by what a layer's `cpu_linear` refers to (`dispatch_cpu_unquantized_gemm`).  vLLM's own
reload makes both anew, by the code of a first load; only compiled graphs would keep the old addresses.
CUDA   vLLM's sleep mode, level 1: copied to the machine's memory; KV memory is freed with them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from melld.engine.worker.residency.runner import model_runner_of
from melld.engine.worker.start import block_bytes_of, resident_bytes

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

FORMATS = ("auto", "hf", "safetensors")
WEIGHTS_TAG = "weights"
PIECE_BYTES = 512 << 20
"""At least so much goes to sleep at a time: 0.4 s at what was seen on an H200, and vLLM collects garbage after each."""


class CpuWeights:
    """The weights of one engine with one CPU device."""

    def __init__(self, engine: "EngineCore") -> None:
        self._engine = engine
        self._config = engine.vllm_config
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._packed: list[Any] = []

    @property
    def refusal(self) -> str:
        """Return why these weights cannot be read again; empty if they can."""
        config = self._config
        if config.parallel_config.world_size > 1:
            return "only a worker with one device can let go of its weights"
        if not config.model_config.enforce_eager:
            return "compiled graphs keep the addresses of its weights"
        if config.model_config.is_moe:
            return "its experts, packed for the CPU, are not what they were when they are read again"
        if _shares_layers(model_runner_of(self._engine).get_model()):
            return "several of its layers share weights, which vLLM cannot read again in place"
        if config.lora_config is not None or config.speculative_config is not None:
            return "it has adapters, or a drafter"
        if config.model_config.quantization is not None or config.load_config.load_format not in FORMATS:
            return "its weights are quantized, or not loaded from files as they are"
        return ""

    def drop(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Free their memory unless they are wanted again.  Until `restore` the engine computes nothing."""
        if is_wanted():
            return
        model: torch.nn.Module = model_runner_of(self._engine).get_model()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in model.parameters()}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self._packed = [layer for layer in model.modules() if "cpu_linear" in vars(layer)]
        for layer in self._packed:
            del layer.cpu_linear
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """Reload them, if they were freed.

        Raises:
            Exception: whatever vLLM raises; the engine is then of no use.
        """
        if not self._sizes:
            return
        for storage, nbytes in self._sizes:
            storage.resize_(nbytes)
        model_runner_of(self._engine).reload_weights()
        for layer in self._packed:
            if "cpu_linear" not in vars(layer):  # its weight is another layer's
                layer.quant_method.process_weights_after_loading(layer)
        self._sizes, self._packed = [], []

    @property
    def held_bytes(self) -> int:
        """Return what the process holds now."""
        return resident_bytes(self._engine)


class SleepMode:
    """The weights and the KV memory of one engine, as vLLM's sleep mode frees them (`EngineCore.sleep`)."""

    def __init__(self, engine: "EngineCore") -> None:
        self._engine = engine
        self._freed_bytes = 0

    @property
    def refusal(self) -> str:
        """Return why the engine cannot sleep; empty if it can."""
        return "" if self._engine.vllm_config.model_config.enable_sleep_mode else "vLLM's sleep mode is off"

    def drop(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Copy the weights to the machine's memory, piece by piece; free theirs, and at last KV memory.

        It stops between two pieces as soon as they are wanted again.
        """
        free_bytes = _free_bytes()
        allocator = _allocator()
        if self._in_pieces(allocator, is_wanted):
            self._engine.sleep(1)
        self._freed_bytes = _free_bytes() - free_bytes

    @staticmethod
    def _in_pieces(allocator: Any, is_wanted: Callable[[], bool]) -> bool:
        """Have vLLM's allocator put the weights to sleep, some of them at a time; return True once all are."""
        whole, piece = allocator.pointer_to_data, {}
        weights = [(pointer, data) for pointer, data in whole.items() if data.tag == WEIGHTS_TAG]
        try:
            for index, (pointer, data) in enumerate(weights):
                piece[pointer] = data
                if sum(one.handle[1] for one in piece.values()) < PIECE_BYTES and index < len(weights) - 1:
                    continue
                if is_wanted():
                    return False
                allocator.pointer_to_data, piece = piece, {}
                allocator.sleep(WEIGHTS_TAG)
        finally:
            allocator.pointer_to_data = whole
        return True

    def restore(self) -> None:
        """Copy the weights back.

        Raises:
            RuntimeError: vLLM has not woken.
        """
        if not self._engine.is_sleeping():
            _allocator().wake_up()  # it was woken before all pieces were asleep
        elif not self._engine.wake_up():
            raise RuntimeError("vLLM has not woken from its sleep")
        self._freed_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Return what the process holds now on its device."""
        kv_bytes = block_bytes_of(self._engine) * self._engine.scheduler.kv_cache_config.num_blocks
        return max(resident_bytes(self._engine) + int(kv_bytes) - self._freed_bytes, 0)


def weights_of(engine: "EngineCore") -> CpuWeights | SleepMode:
    """Return the weights of this engine, by its kind of device."""
    return CpuWeights(engine) if engine.vllm_config.device_config.device_type == "cpu" else SleepMode(engine)


def _shares_layers(model: torch.nn.Module) -> bool:
    """Return True if a linear layer is used in several places of the model."""
    from vllm.model_executor.layers.linear import LinearBase

    places = [layer for _, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, LinearBase)]
    return len(places) > len(set(places))


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
