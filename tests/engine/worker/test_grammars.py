"""A worker's grammars: who has left takes no time of the thread that compiles."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from melld.engine.worker.grammars import Grammars


def test_the_grammar_of_an_aborted_request_is_not_compiled() -> None:
    """Structured outputs of others wait for what is being compiled, not for what nobody wants any more."""
    free = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as executor:
        manager: Any = SimpleNamespace(executor=executor)
        grammars = Grammars(manager)
        executor.submit(free.wait)
        gone, here = (_request(name) for name in ("gone", "here"))
        manager.grammar_init(gone)
        manager.grammar_init(here)
        grammars.forget(["gone", "unknown"])
        free.set()  # before anything is asserted: who fails here must not wait for a thread that waits
        assert gone.structured_output_request.grammar.cancelled()
        assert not here.structured_output_request.grammar.cancelled()


def _request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name, structured_output_request=SimpleNamespace(grammar=None), sampling_params=SimpleNamespace()
    )
