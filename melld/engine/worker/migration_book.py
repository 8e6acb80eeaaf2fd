"""What a worker notes of the migrations that it takes part in: commands with their payloads, pulls, and leases.

Owns the shapes, and the book of leases.  Carries nothing out: `worker_migration` does.
"""

from typing import Any

import msgspec

from melld.engine.worker.residency.residency import Arrival
from melld.migrate import messages as say
from melld.migrate.snapshot import RequestSnapshot


class Expected(msgspec.Struct, frozen=True):
    """`ReserveBlocks` or `WarmRequest`, with what the reader thread has made of its payload."""

    command: Any
    arrival: Arrival
    core_request: bytes
    output_token_ids: list[int]


class Attaching(msgspec.Struct, frozen=True):
    """`AttachRequest` with its payload."""

    command: say.AttachRequest
    snapshot: RequestSnapshot


class Job(msgspec.Struct, frozen=True):
    """A pull under way: for the command, of these places of the request; what then is attached, if anything."""

    command: Any
    places: frozenset[tuple[int, int]]
    block_epoch: int
    attaching: Attaching | None


class Book(msgspec.Struct):
    """The worker's own book of whose outputs bear which lease."""

    leases: dict[str, int] = {}
    gone: list[str] = []

    def came(self, request: str, lease: int) -> None:
        """The request is here, and its outputs bear this lease."""
        self.leases[request] = lease
        if request in self.gone:  # it was here before, since the last report
            self.gone.remove(request)

    def left(self, request: str) -> None:
        """The request is here no more."""
        if self.leases.pop(request, None) is not None:
            self.gone.append(request)
