"""What a worker is told: the thread that reads its wire, and makes ready what the engine then takes at once.

Owns the reading.  What is slow about a new request (block hashes, grammars, arrivals) is done here, off the engine's
thread; never touches the scheduler.

    wire ──► frames ──► vLLM's requests ──► inbox          a ping is answered from here, also while a step runs
"""

import os
import queue
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine import wire
from melld.engine.frames import FrameDecoder
from melld.engine.residency import Residency
from melld.engine.worker_links import Opening
from melld.engine.worker_migration import refusal
from melld.engine.worker_migration_book import Attaching, Expected
from melld.engine.worker_requests import Admitted, Resumed
from melld.errors import MelldError
from melld.migrate import migration_messages as say
from melld.migrate.snapshot import RequestSnapshot

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

READ_BYTES = 1 << 18


class Reader:
    """`answer` takes what the daemon is told at once; `pong` makes the answer to a ping."""

    def __init__(
        self,
        connection: socket.socket,
        engine: "EngineCore",
        residency: Residency,
        inbox: "queue.SimpleQueue[Any]",
        answer: Callable[[msgspec.Struct], None],
        pong: Callable[[], wire.Pong],
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._residency = residency
        self._inbox = inbox
        self._answer = answer
        self._pong = pong

    def read(self) -> None:
        """Until the daemon is gone, and with it everyone who could want this process: it ends here."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        requests = MsgpackDecoder(EngineCoreRequest)
        frames = FrameDecoder(wire.ToWorker)
        while data := self._connection.recv(READ_BYTES):
            for message, payload in frames.feed(data):
                match message:
                    case wire.Ping():
                        self._answer(self._pong())
                    case wire.AddRequest():
                        self._admit(message, requests.decode(payload))
                    case wire.ResumeRequest():
                        self._answer(wire.RequestTaken(request=message.request, lease=message.lease))
                        self._admit(message, RequestSnapshot.decode(payload[0]))
                    case say.ReserveBlocks() | say.WarmRequest():
                        self._expect(message, payload)
                    case say.AttachRequest():
                        self._inbox.put(Attaching(message, RequestSnapshot.decode(payload[0])))
                    case wire.OpenLink():
                        self._inbox.put(Opening(message.peer, payload[0]))
                    case wire.AbortRequests():
                        # Into the running step as well, so that its output is not computed in vain.
                        self._engine.aborts_queue.put_nowait(message.requests)
                        self._inbox.put(message)
                    case _:
                        self._inbox.put(message)
        os._exit(0)

    def _expect(self, command: say.ReserveBlocks | say.WarmRequest, payload: list[bytes]) -> None:
        core_request, tokens = payload[0], msgspec.msgpack.decode(payload[1], type=list[int])
        try:
            arrival = self._residency.prepare(core_request, tokens)
        except MelldError as error:
            self._answer(refusal(command, error))
        else:
            self._inbox.put(Expected(command, arrival, core_request, tokens))

    def _admit(self, message: wire.AddRequest | wire.ResumeRequest, request: Any) -> None:
        try:
            if isinstance(message, wire.ResumeRequest):
                arrival = self._residency.prepare(request.core_request, request.output_token_ids)
                self._inbox.put(Resumed(arrival, request, message.lease))
                return
            prepared, _ = self._engine.preprocess_add_request(request)
        except Exception as error:  # noqa: BLE001  the boundary of one request: answered, and the others go on
            reason = f"{type(error).__name__}: {error}"
            self._answer(wire.RequestRejected(request=message.request, reason=reason))
        else:
            self._inbox.put(Admitted(prepared, message.lease))
