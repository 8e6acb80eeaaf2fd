"""The grammars of a worker's requests: compiled by the compiler that a judge chose, dropped when a request is aborted.

Owns the compilations that have not begun.  Takes the place of the one step of vLLM's manager that begins them.
"""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from melld.engine.worker.grammar_backends import GrammarBackends

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager


class Grammars:
    """Compiles for one engine, on the threads of vLLM's manager."""

    def __init__(self, manager: "StructuredOutputManager") -> None:
        self._manager: Any = manager
        self._backends: GrammarBackends | None = None
        self._begun: dict[str, Future[Any]] = {}
        self._manager.grammar_init = self.begin

    def begin(self, request: "Request") -> None:
        """Have the request's grammar compiled; vLLM's scheduler waits for it."""
        wanted = request.structured_output_request
        if wanted is None:
            return
        future = self._begun[request.request_id] = self._manager.executor.submit(self._compile, request)
        future.add_done_callback(lambda done: self._ended(request.request_id, done))
        wanted.grammar = future

    def forget(self, requests: list[str]) -> None:
        """Drop those that have not begun: their clients have left."""
        for request in requests:
            if (future := self._begun.get(request)) is not None:
                future.cancel()

    def _ended(self, request: str, future: Future[Any]) -> None:
        if self._begun.get(request) is future:  # and not that of a request which has come back since
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
