"""The preparer thread: builds vLLM's request, its block hashes and its grammar before the engine takes a message.

Owns this work, off the engine thread, which steps meanwhile, and off the reader thread, which answers pings.  Messages
reach the inbox in the order of their arrival.  Never touches the scheduler.
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
from melld.engine.worker.requests import Admitted, ReadyToResume
from melld.engine.worker.residency.residency import Residency
from melld.migrate import messages as say
from melld.migrate.snapshot import RequestSnapshot


class Preparer:
    """The preparer of one worker: `line` holds messages read from the wire; `answer` sends one to the daemon.

    `request_of` decodes the payload of an `AddRequest` to vLLM's request.
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
        """Prepare one message after the other, without end."""
        while True:
            message, payload = self._line.get()
            try:
                self._inbox.put(self._prepared(message, payload))
            except Exception as error:  # the boundary of one request: answer, and go on with the others
                match message:
                    case wire.AddRequest() | wire.ResumeRequest():
                        reason = f"{type(error).__name__}: {error}"
                        self._answer(wire.RequestRejected(request=message.request, reason=reason, cause=message.cause))
                    case say.ReserveBlocks() | say.WarmRequest() | say.AttachRequest():
                        self._answer(refusal(message, error))
                    case _:
                        raise

    def _prepared(self, message: Any, payload: list[bytes]) -> Any:
        """Return the message for the engine thread."""
        match message:
            case wire.AddRequest():
                return Admitted(self._request_of(payload), message.lease, message.cause)
            case wire.ResumeRequest():
                self._answer(wire.RequestTaken(request=message.request, lease=message.lease))
                tokens = msgspec.msgpack.decode(payload[1], type=list[int])
                return ReadyToResume(self._residency.prepare(payload[0], tokens), message.lease, message.cause)
            case say.ReserveBlocks() | say.WarmRequest():
                tokens = msgspec.msgpack.decode(payload[1], type=list[int])
                return Expected(message, self._residency.prepare(payload[0], tokens), payload[0], tokens)
            case say.AttachRequest():
                return Attaching(message, msgspec.msgpack.decode(payload[0], type=RequestSnapshot))
            case wire.OpenLink():
                return Opening(message.peer, payload[0])
        return message
