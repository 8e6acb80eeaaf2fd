"""A worker's loop: what it is told between two steps."""

import queue
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from melld.engine.wire import messages as wire
from melld.engine.worker.main import EngineLoop

DEADLINE_S = 30.0


def test_an_idle_worker_that_is_told_to_stop_with_other_news_stops_at_once() -> None:
    """One that waited for yet another message would be killed at its deadline."""
    loop: Any = EngineLoop.__new__(EngineLoop)
    loop._engine = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: False), batch_queue=None)
    loop._parts = parts = MagicMock(inbox=queue.SimpleQueue())
    loop._stopping, loop._handlers = False, loop._handlers_of()
    for message in (wire.CloseLink("w1"), wire.StopWorker()):
        parts.inbox.put(message)
    serving = threading.Thread(target=loop.serve, daemon=True)
    serving.start()
    serving.join(DEADLINE_S)
    assert not serving.is_alive()
    parts.links.close.assert_called_once_with("w1")
