"""The preparer thread: builds vLLM's request, its block hashes and its grammar before the engine takes a message.

Owns this work, off the engine thread, which steps meanwhile, and off the reader thread, which answers pings.  Messages
reach the inbox in the order of their arrival, but for those that wait for a grammar: no other request waits for it.
Never touches the scheduler.
"""

import queue
from collections.abc import Callable
from typing import Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.worker.links import Opening
from melld.engine.worker.migration_book import Attaching, Expected, refusal
from melld.engine.worker.reader import Received
from melld.engine.worker.requests import Admitted, ReadyToResume
from melld.engine.worker.residency.residency import Arrival, Residency
from melld.migrate import messages as say
from melld.migrate.snapshot import RequestSnapshot

Coming = wire.ResumeRequest | say.ReserveBlocks | say.WarmRequest
"""Messages with a request that has tokens already, which its grammar has to accept."""


class Compiled(msgspec.Struct, frozen=True):
    """A message whose request's grammar is compiled, or cannot be; with the payload of the message."""

    message: Coming
    arrival: Arrival


class Preparer:
    """The preparer of one worker: `line` holds messages read from the wire.

    `answer` sends a message to the daemon and returns once it is on its way: a request that ends its worker at once
    must be known to have been there.
    """

    def __init__(
        self,
        line: "queue.SimpleQueue[Received]",
        residency: Residency,
        inbox: "queue.SimpleQueue[Any]",
        answer: Callable[[msgspec.Struct], None],
    ) -> None:
        self._line = line
        self._residency = residency
        self._inbox = inbox
        self._answer = answer
        self._waiting: dict[str, Coming] = {}
        """The messages that wait for a grammar, by request: the newest of each."""

    def run(self) -> None:
        """Prepare one message after the other, without end."""
        while True:
            message, payload = self._line.get()
            try:
                if (prepared := self._prepared(message, payload)) is not None:
                    self._inbox.put(prepared)
            except Exception as error:  # noqa: BLE001  the boundary of one request: answer, and go on with the others
                self._refuse(message.message if isinstance(message, Compiled) else message, error)

    def _refuse(self, message: Any, error: Exception) -> None:
        match message:
            case wire.AddRequest() | wire.ResumeRequest():
                reason = f"{type(error).__name__}: {error}"
                self._answer(wire.RequestRejected(request=message.request, reason=reason, cause=message.cause))
            case say.ReserveBlocks() | say.WarmRequest() | say.AttachRequest():
                self._answer(refusal(message, error))
            case _:
                raise error

    def _prepared(self, message: Any, payload: list[bytes]) -> Any:
        """Return the message for the engine thread, or None if it has to wait or is obsolete."""
        match message:
            case wire.AddRequest():
                return Admitted(self._residency.prepare(payload[0]).request, message.lease, message.cause)
            case wire.ResumeRequest() | say.ReserveBlocks() | say.WarmRequest():
                return self._coming(message, payload)
            case Compiled():
                if self._waiting.get(message.message.request) is not message.message:
                    return None  # aborted or cancelled meanwhile, and maybe sent again
                del self._waiting[message.message.request]
                return self._came(message.message, message.arrival, payload)
            case wire.AbortRequests():
                for request in message.requests:
                    self._waiting.pop(request, None)
            case say.CancelReservation():
                waiting = self._waiting.get(message.request)
                if isinstance(waiting, say.MoveMessage) and waiting.move == message.move:
                    del self._waiting[message.request]  # what comes by another way than this move stays
            case say.AttachRequest():
                return Attaching(message, msgspec.msgpack.decode(payload[0], type=RequestSnapshot))
            case wire.OpenLink():
                return Opening(message.peer, payload[0])
        return message

    def _coming(self, message: Coming, payload: list[bytes]) -> Any:
        if isinstance(message, wire.ResumeRequest):
            self._answer(wire.RequestTaken(request=message.request, lease=message.lease))
        arrival = self._residency.prepare(payload[0])
        if (compiling := arrival.compiling) is None:
            return self._came(message, arrival, payload)
        self._waiting[message.request] = message
        compiling.add_done_callback(lambda _: self._line.put((Compiled(message, arrival), payload)))
        return None

    def _came(self, message: Coming, arrival: Arrival, payload: list[bytes]) -> ReadyToResume | Expected:
        tokens = msgspec.msgpack.decode(payload[1], type=list[int])
        arrival = self._residency.complete(arrival, tokens)
        if isinstance(message, wire.ResumeRequest):
            return ReadyToResume(arrival, message.lease, message.cause)
        return Expected(message, arrival, payload[0], tokens)
