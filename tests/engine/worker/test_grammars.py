"""A worker's grammars: departed requests take no time of the compiling thread."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from melld.engine.worker.grammars import Grammars


def test_an_aborted_request_s_grammar_is_not_compiled() -> None:
    """Others' structured outputs wait for compilations in progress, not for unwanted ones."""
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
