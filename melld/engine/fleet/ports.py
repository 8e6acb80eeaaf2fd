"""What a fleet asks of those around it: of vLLM's encoding, of its driver, and of whoever runs the migrations.

Owns the contracts, and the one between the fleet and its supervisor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from melld.engine.fleet.place import Slot
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.ids import RequestId, WorkerId
from melld.scheduler import events


class Codec(Protocol):
    """vLLM's own encoding, and the few fields of its Structs that the fleet needs."""

    def encode_request(self, core_request: Any) -> bytes:
        """An `EngineCoreRequest`, whole, with its images."""

    def decode_outputs(self, buffers: Sequence[bytes], engine_index: int) -> Any:
        """An `EngineCoreOutputs` of that worker."""


class MoveKeeper(Protocol):
    """Who runs the migrations, and is told what concerns them."""

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """A worker can be moved to and from."""

    def worker_lost(self, worker: WorkerId) -> None:
        """It is gone.  Said before its requests are given to others."""

    def answered(self, worker: WorkerId, message: Any, payload: list[bytes]) -> None:
        """A worker's answer to a command of a migration, or of a link."""

    def request_ended(self, request: RequestId) -> None:
        """It has ended, or its client has left.  The worker that owns it frees it of its own accord."""

    def went_on(self, request: RequestId, gap_s: float) -> None:
        """The first output since it was handed over, so long after the last one before."""


class FleetListener(Protocol):
    """Who decides what becomes of the fleet's requests."""

    @property
    def executor(self) -> MoveKeeper:
        """Who runs the migrations."""

    def handle(self, event: events.AnyEvent) -> None:
        """Hear an event, and act on it before returning."""


class WorkerListener(Protocol):
    """Who hears of each worker, on the event loop: the fleet."""

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """A frame came."""

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """The process is gone; nothing more comes from it."""

    def worker_steadied(self, slot: Slot) -> None:
        """It has worked for long enough since its last death."""
