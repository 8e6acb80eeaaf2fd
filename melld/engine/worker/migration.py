"""A worker's part in migrations: it carries out each command of `wire/migration` and answers it once.

Owns the order of the commands, the destination's side of migrations, and the copies under way; `leavers` has the
source's.  For the engine thread, between two steps.  Never decides: the daemon does; never touches vLLM:
`engine/residency` does.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from melld.engine.worker.leavers import Leavers
from melld.engine.worker.links import Links
from melld.engine.worker.migration_book import Attaching, Book, CommandOrder, Expected, Job, names_of, refusal
from melld.engine.worker.residency.residency import Residency
from melld.errors import MelldError
from melld.migrate import messages as say
from melld.migrate.snapshot import MoveRefused, NoRoom, Via
from melld.migrate.transports.copies import CopyDone

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

LAST_COPY_S = 0.003
"""Time that the next step waits for a frozen request's last blocks, to include the request."""


class Moves:
    """The migrations that this worker takes part in.  `answer(message, payload)` goes to the daemon."""

    def __init__(
        self,
        residency: Residency,
        links: Links,
        book: Book,
        answer: Callable[[Any, Sequence[bytes]], None],
    ) -> None:
        self.warming: dict[str, Expected] = {}
        self._residency = residency
        self._links = links
        self._book = book
        self._answer = answer
        self._order = CommandOrder()
        self._jobs: dict[str, Job] = {}
        self._leavers = Leavers(residency, book, answer)
        self.after_report = self._leavers.after_report
        self.handlers: dict[type, Callable[[Any], None]] = {
            **self._leavers.handlers,
            Expected: self._expect,
            say.CopyBlocks: self._copy,
            Attaching: self._attach,
            say.CancelReservation: self._cancel,
        }

    def handle(self, command: Any) -> None:
        """Carry out the command, or answer why not.  Ignore one that arrives twice or too late."""
        told: say.MoveCommand = getattr(command, "command", command)
        if not self._order.is_next(told.request, told.move, told.number):
            return
        try:
            self.handlers[type(command)](command)
        except MelldError as error:
            self._refuse(told, error)

    def _refuse(self, command: say.MoveCommand, error: MelldError) -> None:
        self._answer(refusal(command, error), ())

    # -- beside the steps -------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Continue warming, also before the engine goes idle."""
        if self.warming:
            self._residency.warm_on()

    def after_step(self, outputs: "EngineCoreOutputs | None") -> None:
        """Remove outputs that only migrations need, and continue the migrations that waited for them."""
        if self.warming:
            for request in self._residency.take_warmed(outputs):
                expected = self.warming.pop(request)
                try:
                    self._reserve(expected)
                except (MoveRefused, NoRoom) as error:
                    self._refuse(expected.command, error)

    def forget(self, requests: Sequence[str]) -> None:
        """Drop all state of requests that have left: their blocks are free, and no reply is expected."""
        for request in requests:
            self.warming.pop(request, None)
            self._leavers.forget(request)
        self._residency.abort(requests)
        for request in requests:
            self._book.left(request)

    # -- the destination --------------------------------------------------------------------------------------------

    def _expect(self, expected: Expected) -> None:
        request = expected.command.request
        warm = isinstance(expected.command, say.WarmRequest)
        if warm and request in self._residency.expected:  # repeated: the computed blocks stay in the prefix cache
            self._residency.cancel(request)
        tokens = expected.output_token_ids
        if warm and self._residency.warm(expected.core_request, tokens, expected.command.tokens_per_s):
            self.warming[request] = expected
        else:
            self._reserve(expected)

    def _reserve(self, expected: Expected) -> None:
        command = expected.command
        computed = getattr(command, "computed_tokens", 0)
        self._residency.reserve(expected.arrival, command.token_capacity, computed)
        self._answer(say.RoomReserved(**names_of(command)), ())

    def _copy(self, command: say.CopyBlocks) -> None:
        if not self._pull(command, command.block_ids, command.block_epoch, command.token_capacity, None):
            self._answer(say.BlocksCopied(**names_of(command), blocks=0, nbytes=0, copy_s=0.0), ())

    def _attach(self, attaching: Attaching) -> None:
        command, snapshot = attaching.command, attaching.snapshot
        if command.via is Via.KV:
            self._links.watch()
            if self._pull(command, snapshot.block_ids, snapshot.block_epoch, snapshot.num_tokens, attaching):
                self._links.wait(LAST_COPY_S)
                return
        self._enter(attaching, 0, 0, 0.0)

    def _pull(
        self,
        command: Any,
        block_ids: say.BlockIds,
        block_epoch: int,
        token_capacity: int,
        attaching: Attaching | None,
    ) -> bool:
        """Start to copy the missing blocks; return False if none is missing."""
        request = command.request
        plan, copies = self._residency.plan(request), self._links.to(command.source)
        if plan is None or copies is None:
            raise MelldError(
                f"no blocks are reserved for {request}" if plan is None else f"no link to {command.source}"
            )
        blocks, into, places = plan.missing(block_ids, block_epoch, self._residency.grow(request, token_capacity))
        if not blocks:
            return False
        name = f"{command.move}.{command.number}"
        self._jobs[name] = Job(command, places, block_epoch, attaching)
        self._residency.copy_began(request)
        bytes_per_s = getattr(command, "bytes_per_s", 0.0)
        copies.submit(name, blocks, into, urgent=attaching is not None, bytes_per_s=bytes_per_s)
        return True

    def copied(self, done: CopyDone) -> None:
        """Continue after a pull that has ended or failed."""
        job = self._jobs.pop(done.job)
        command = job.command
        self._residency.copy_ended(command.request)
        plan = self._residency.plan(command.request)
        if done.failure is not None:
            self._answer(say.CopyFailed(**names_of(command), reason=done.failure), ())
            return
        if done.pulled is None or plan is None:
            self._answer(say.CommandFailed(**names_of(command), reason="it was cancelled"), ())
            return
        plan.copied(job.places, job.block_epoch)
        pulled = done.pulled
        if job.attaching is None:
            copied = say.BlocksCopied(
                **names_of(command), blocks=pulled.blocks, nbytes=pulled.nbytes, copy_s=pulled.copy_s
            )
            self._answer(copied, ())
            return
        try:
            self._enter(job.attaching, pulled.blocks, pulled.nbytes, pulled.copy_s)
        except (MoveRefused, NoRoom) as error:
            self._refuse(command, error)

    def _enter(self, attaching: Attaching, blocks: int, nbytes: int, copy_s: float) -> None:
        command = attaching.command
        self._residency.attach(attaching.snapshot, command.via)
        self._book.came(command.request, command.lease)
        attached = say.RequestAttached(**names_of(command), blocks=blocks, nbytes=nbytes, copy_s=copy_s)
        self._answer(attached, ())

    def _cancel(self, command: say.CancelReservation) -> None:
        if self._book.leases.get(command.request, command.lease) != command.lease:
            self._answer(say.ReservationCancelled(**names_of(command)), ())  # cancelled, and reserved again since
            return
        for name, job in self._jobs.items():
            if job.command.request == command.request and (copies := self._links.to(job.command.source)):
                copies.cancel(name)
        if command.request in self._book.leases:  # it came, and its source was let go before: what, then, was copied?
            self._residency.uncache(command.request)
        self.forget([command.request])
        self._answer(say.ReservationCancelled(**names_of(command)), ())
