"""A worker's records of its migrations: commands with payloads and order, pulls, and leases.

Owns the shapes, the book of leases, and the newest command of each request.  Never carries anything out:
`worker/migration.py` does.
"""

import collections
from typing import Any

import msgspec

from melld.engine.worker.residency.residency import Arrival
from melld.migrate import messages as say
from melld.migrate.snapshot import MoveRefused, RequestSnapshot

REMEMBERED = 4096
"""Limit of requests; above it, those with the oldest commands are forgotten."""


class Expected(msgspec.Struct, frozen=True):
    """A `ReserveBlocks` or `WarmRequest` command, with its payload as the preparer thread decoded it."""

    command: Any
    arrival: Arrival
    core_request: bytes
    output_token_ids: list[int]


class Attaching(msgspec.Struct, frozen=True):
    """An `AttachRequest` command with its payload."""

    command: say.AttachRequest
    snapshot: RequestSnapshot


class Job(msgspec.Struct, frozen=True):
    """A pull under way: its command, the block places it copies, and the request to attach afterwards, if any."""

    command: Any
    places: frozenset[tuple[int, int]]
    block_epoch: int
    attaching: Attaching | None


class Book(msgspec.Struct):
    """The lease of each request on this worker, which its outputs carry."""

    leases: dict[str, int] = {}
    gone: list[str] = []

    def came(self, request: str, lease: int) -> None:
        """Record that the request is here, and that its outputs carry this lease."""
        self.leases[request] = lease
        if request in self.gone:  # here before, since the last report
            self.gone.remove(request)

    def left(self, request: str) -> None:
        """Record that the request has left."""
        if self.leases.pop(request, None) is not None:
            self.gone.append(request)


def names_of(command: Any) -> dict[str, Any]:
    """Return the fields that an answer repeats from its command."""
    return {"move": command.move, "number": command.number, "request": command.request, "cause": command.cause}


def refusal(command: say.MoveCommand, error: Exception) -> say.CommandFailed:
    """Return the answer that the command was not carried out."""
    reason = error.reason.value if isinstance(error, MoveRefused) else str(error)
    return say.CommandFailed(**names_of(command), reason=reason)


class CommandOrder:
    """The newest command of each request: passes each once, and none after a later one.

    Moves have consecutive numbers, and so have the commands of one move: so a command that arrives twice or too late is
    recognised, and changes nothing.
    """

    def __init__(self) -> None:
        self._newest: collections.OrderedDict[str, tuple[int, int]] = collections.OrderedDict()

    def is_next(self, request: str, move: int, number: int) -> bool:
        """Return True, and record the command, if it is newer than all earlier ones of this request."""
        if (move, number) <= self._newest.get(request, (0, 0)):
            return False
        self._newest[request] = move, number
        self._newest.move_to_end(request)
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return True
