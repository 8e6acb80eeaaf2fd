"""The grammars of a worker's requests: compiled by the compiler that a judge chose, dropped when a request is aborted.

Owns vLLM's compilers by name, the same in judges and in workers, and the compilations not yet begun.  Replaces the one
step of vLLM's manager that starts them.
"""

import importlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager


class Grammars:
    """The grammar compilations of one engine, on the threads of vLLM's manager."""

    def __init__(self, manager: "StructuredOutputManager") -> None:
        self._manager: Any = manager
        self._backends: GrammarBackends | None = None
        self._begun: dict[str, Future[Any]] = {}
        self._manager.grammar_init = self.begin

    def begin(self, request: "Request") -> None:
        """Start compiling the request's grammar, which vLLM's scheduler waits for."""
        wanted = request.structured_output_request
        if wanted is None:
            return
        future = self._begun[request.request_id] = self._manager.executor.submit(self._compile, request)
        future.add_done_callback(lambda done: self._ended(request.request_id, done))
        wanted.grammar = future

    def forget(self, requests: list[str]) -> None:
        """Drop the compilations of these requests that have not begun: their clients have left."""
        for request in requests:
            if (future := self._begun.get(request)) is not None:
                future.cancel()

    def _ended(self, request: str, future: Future[Any]) -> None:
        if self._begun.get(request) is future:  # not that of a request with the same id that arrived since
            del self._begun[request]

    def _compile(self, request: "Request") -> Any:
        wanted, sampling = request.structured_output_request, request.sampling_params
        assert wanted is not None
        assert sampling is not None
        manager = self._manager
        if self._backends is None:
            self._backends = GrammarBackends(manager.vllm_config, manager.tokenizer)
        backend = self._backends.get(wanted.params._backend or "")  # noqa: SLF001  vLLM's own way to name it
        if manager.backend is None:
            manager.backend = backend  # allocates the masks of all of them
        kind, text = wanted.structured_output_key
        return backend.compile_grammar(kind, text, stop_token_ids=sampling.all_stop_token_ids)


class GrammarBackends:
    """The compilers for one model's tokenizer, each made when first needed.  Thread-safe.

    vLLM's own manager keeps the one that its first request needed, and gives it what others have validated.
    """

    def __init__(self, vllm_config: "VllmConfig", tokenizer: Any) -> None:
        self._vllm_config = vllm_config
        self._tokenizer = tokenizer
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Any:
        """Return the compiler of that name, a `StructuredOutputBackend`."""
        with self._lock:
            if name not in self._made:
                vocab_size = self._vllm_config.model_config.get_vocab_size()
                self._made[name] = _class_of(name)(self._vllm_config, tokenizer=self._tokenizer, vocab_size=vocab_size)
            return self._made[name]


_CLASSES = {
    "xgrammar": "XgrammarBackend",
    "guidance": "GuidanceBackend",
    "outlines": "OutlinesBackend",
    "lm-format-enforcer": "LMFormatEnforcerBackend",
}


def _class_of(name: str) -> Any:
    kind = _CLASSES[name]
    return getattr(importlib.import_module(f"vllm.v1.structured_output.backend_{name.replace('-', '_')}"), kind)
