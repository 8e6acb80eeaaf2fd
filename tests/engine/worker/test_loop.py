"""A worker's loop: what it hears between two steps."""

import queue
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from melld.engine.wire import messages as wire
from melld.engine.worker.main import EngineLoop, reason_of
from tests.patience import PATIENCE_S


def test_a_stop_among_other_messages_is_obeyed_at_once() -> None:
    """An idle worker that waited for yet another message would be killed at its deadline."""
    loop: Any = EngineLoop.__new__(EngineLoop)
    loop._engine = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: False), batch_queue=None)
    loop._parts = parts = MagicMock(inbox=queue.SimpleQueue())
    loop._stopping, loop._handlers = False, loop._handlers_of()
    for message in (wire.CloseLink("w1"), wire.StopWorker()):
        parts.inbox.put(message)
    serving = threading.Thread(target=loop.serve, daemon=True)
    serving.start()
    serving.join(PATIENCE_S)
    assert not serving.is_alive()
    parts.links.close.assert_called_once_with("w1")


def test_a_value_that_vllm_refuses_is_reported_with_the_problem() -> None:
    """Not with the number of errors, which is that message's first line."""
    from vllm.config import ParallelConfig

    with pytest.raises(ValueError, match="1 validation error") as refused:
        ParallelConfig(pipeline_parallel_size=-3)
    assert reason_of(refused.value) == "ValidationError: Input should be greater than or equal to 1"
    assert reason_of(KeyError("w0")) == "KeyError: 'w0'"
