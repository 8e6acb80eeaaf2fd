"""What a worker does with a message before its engine takes it: vLLM's request, its block hashes, its grammar.

Owns the preparing, on a thread of its own: off the engine's, which steps meanwhile, and off the reader's, which answers
pings.  Messages reach the inbox in the order in which they came.  Never touches the scheduler.
"""

import queue
from collections.abc import Callable
from typing import Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.worker.links import Opening
from melld.engine.worker.migration import refusal
from melld.engine.worker.migration_book import Attaching, Expected
from melld.engine.worker.reader import Received
from melld.engine.worker.requests import Admitted, Resumed
from melld.engine.worker.residency.residency import Residency
from melld.migrate import messages as say
from melld.migrate.snapshot import RequestSnapshot


class Preparer:
    """`line` has what was read from the wire; `answer` takes what the daemon is told at once.

    `request_of` makes vLLM's request of the payload of an `AddRequest`.
    """

    def __init__(
        self,
        line: "queue.SimpleQueue[Received]",
        request_of: Callable[[list[bytes]], Any],
        residency: Residency,
        inbox: "queue.SimpleQueue[Any]",
        answer: Callable[[msgspec.Struct], None],
    ) -> None:
        self._line = line
        self._request_of = request_of
        self._residency = residency
        self._inbox = inbox
        self._answer = answer

    def run(self) -> None:
        """Prepare one message after the other, for ever."""
        while True:
            message, payload = self._line.get()
            try:
                self._inbox.put(self._prepared(message, payload))
            except Exception as error:  # the boundary of one request: answered, and the others go on
                match message:
                    case wire.AddRequest() | wire.ResumeRequest():
                        reason = f"{type(error).__name__}: {error}"
                        self._answer(wire.RequestRejected(request=message.request, reason=reason))
                    case say.ReserveBlocks() | say.WarmRequest() | say.AttachRequest():
                        self._answer(refusal(message, error))
                    case _:
                        raise

    def _prepared(self, message: Any, payload: list[bytes]) -> Any:
        """What the engine's thread is to handle."""
        match message:
            case wire.AddRequest():
                return Admitted(self._request_of(payload), message.lease)
            case wire.ResumeRequest():
                self._answer(wire.RequestTaken(request=message.request, lease=message.lease))
                snapshot = RequestSnapshot.decode(payload[0])
                arrival = self._residency.prepare(snapshot.core_request, snapshot.output_token_ids)
                return Resumed(arrival, snapshot, message.lease)
            case say.ReserveBlocks() | say.WarmRequest():
                tokens = msgspec.msgpack.decode(payload[1], type=list[int])
                return Expected(message, self._residency.prepare(payload[0], tokens), payload[0], tokens)
            case say.AttachRequest():
                return Attaching(message, RequestSnapshot.decode(payload[0]))
            case wire.OpenLink():
                return Opening(message.peer, payload[0])
        return message
