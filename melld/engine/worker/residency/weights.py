"""Lets go of an engine's weights on the CPU, and reads them again from the model's files.

Knows where vLLM's CPU layers keep them: in parameters, and packed for oneDNN by what a layer's `cpu_linear` refers to
(`dispatch_cpu_unquantized_gemm`).  vLLM's own reload makes both anew, by the code of a first load; only compiled graphs
would keep addresses of the old ones.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

FORMATS = ("auto", "hf", "safetensors")


class Weights:
    """The weights of one engine with one device."""

    def __init__(self, engine: "EngineCore") -> None:
        self._config = engine.vllm_config
        self._executor: Any = engine.model_executor
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._packed: list[Any] = []

    @property
    def refusal(self) -> str:
        """Return why these weights cannot be read again; empty if they can."""
        config = self._config
        if config.device_config.device_type != "cpu" or config.parallel_config.world_size > 1:
            return "only a worker with one CPU device can let go of its weights"
        if not config.model_config.enforce_eager:
            return "compiled graphs keep the addresses of its weights"
        if config.lora_config is not None or config.speculative_config is not None:
            return "it has adapters, or a drafter"
        if config.model_config.quantization is not None or config.load_config.load_format not in FORMATS:
            return "its weights are quantized, or not loaded from files as they are"
        return ""

    def drop(self) -> None:
        """Free their memory.  Until `restore` the engine computes nothing."""
        model = self._model()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in model.parameters()}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self._packed = [layer for layer in model.modules() if "cpu_linear" in vars(layer)]
        for layer in self._packed:
            del layer.cpu_linear
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """Read them again.

        Raises:
            Exception: whatever vLLM raises; the engine is then of no use.
        """
        for storage, nbytes in self._sizes:
            storage.resize_(nbytes)
        self._runner().reload_weights()
        for layer in self._packed:
            if "cpu_linear" not in vars(layer):  # its weight is another layer's
                layer.quant_method.process_weights_after_loading(layer)

    def _runner(self) -> Any:
        return self._executor.driver_worker.worker.model_runner

    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner().get_model()
        return model
