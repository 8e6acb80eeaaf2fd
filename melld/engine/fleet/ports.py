"""The fleet's ports: vLLM's encoding, the driver, the executor of migrations, and the supervisor's listener."""

from collections.abc import Sequence
from typing import Any, Protocol

from melld.engine.fleet.place import Slot
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.ids import RequestId, WorkerId
from melld.scheduler import events


class Codec(Protocol):
    """vLLM's own encoding of its messages."""

    def encode_request(self, core_request: Any) -> bytes:
        """Encode an `EngineCoreRequest` with its images."""

    def decode_outputs(self, buffers: Sequence[bytes]) -> Any:
        """Decode an `EngineCoreOutputs`."""


class MoveKeeper(Protocol):
    """Runs the migrations and hears what concerns them."""

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """Note that requests can move to and from the worker."""

    def worker_lost(self, worker: WorkerId) -> None:
        """Handle the worker's exit.  Called before its requests are placed elsewhere."""

    def answered(self, worker: WorkerId, message: Any, payload: list[bytes]) -> None:
        """Handle a worker's answer to a command of a migration or of a link."""

    def request_ended(self, request: RequestId) -> None:
        """Note that the request has ended or its client has left.  Its owner frees its blocks by itself."""

    def resumed(self, request: RequestId, gap_s: float | None) -> None:
        """Note the first output since the request was handed over, `gap_s` after the last one before, if any."""


class FleetListener(Protocol):
    """Decides where the fleet's requests go."""

    @property
    def executor(self) -> MoveKeeper:
        """Return the executor of migrations."""

    def handle(self, event: events.AnyEvent) -> None:
        """Act on an event before returning."""


class WorkerListener(Protocol):
    """Called about each worker, on the event loop.  The fleet is one."""

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """Handle a worker's message."""

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """Handle the process exiting or dozing: it sends nothing more until it becomes ready again."""

    def worker_steadied(self, slot: Slot) -> None:
        """Note that the worker has run long enough since its last death."""
