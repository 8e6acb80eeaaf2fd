"""vLLM's compilers of constraints, by name: the same in judges and in workers.

Owns the compilers of one process, each made when it is first needed.  vLLM's own manager keeps the one that its first
request needed, and gives it what others have validated.
"""

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GrammarBackends:
    """The compilers for one model's tokenizer.  Any thread may ask."""

    def __init__(self, vllm_config: "VllmConfig", tokenizer: Any) -> None:
        self._vllm_config = vllm_config
        self._tokenizer = tokenizer
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Any:
        """The compiler of that name, a `StructuredOutputBackend`."""
        with self._lock:
            if name not in self._made:
                vocab_size = self._vllm_config.model_config.get_vocab_size()
                self._made[name] = _class_of(name)(self._vllm_config, tokenizer=self._tokenizer, vocab_size=vocab_size)
            return self._made[name]


def _class_of(name: str) -> Any:
    match name:
        case "xgrammar":
            from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

            return XgrammarBackend
        case "guidance":
            from vllm.v1.structured_output.backend_guidance import GuidanceBackend

            return GuidanceBackend
        case "outlines":
            from vllm.v1.structured_output.backend_outlines import OutlinesBackend

            return OutlinesBackend
        case "lm-format-enforcer":
            from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

            return LMFormatEnforcerBackend
    raise ValueError(f"there is no structured output backend {name!r}")
