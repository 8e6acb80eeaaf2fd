"""Two workers, a daemon and four wires, reduced to one migration: a model to test the table on.

Tokens are numbers that count up.  A worker's next token is what follows the tokens that its copy of the request has:
a token that the daemon accepts must be the next of its own log, or one was lost, doubled or altered.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from melld.engine.worker.migration_book import CommandOrder
from melld.ids import RequestId, WorkerId
from melld.migrate import messages as say
from melld.migrate.migration import Finish, HandOver, Migration, Tell
from melld.migrate.snapshot import RequestFacts, Via
from melld.migrate.table import MoveState, Outcome, Sign
from melld.migrate.wish import Wish

SOURCE, DESTINATION = WorkerId("source"), WorkerId("destination")
REQUEST = RequestId("request")
LENGTH = 30
PROMPT = 3
CHUNKS = 4
"""Of a prompt that is followed: its last one brings the first token."""


@dataclass
class Copy:
    """The request on one worker: its tokens, and whether it runs."""

    tokens: int
    lease: int
    frozen: bool = False
    chunks_left: int = 0

    @property
    def blocks(self) -> int:
        """Return its full blocks, of two tokens; a chunk has three."""
        return self.tokens // 2 + 3 * (CHUNKS - self.chunks_left)


@dataclass
class Worker:
    """One worker: its copy of the request, its reserved room, and its wires."""

    copy: Copy | None = None
    room: bool = False
    alive: bool = True
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    order: CommandOrder = field(default_factory=CommandOrder)
    parked: say.DescribeRequest | None = None


class World:
    """A migration's two workers and wires; a script of small numbers chooses among possible events."""

    def __init__(self, via: Via | None, *, after_first_token: bool = False) -> None:
        chunks = CHUNKS if after_first_token else 0
        self.workers = {SOURCE: Worker(Copy(PROMPT, 0, chunks_left=chunks)), DESTINATION: Worker()}
        self.owner: WorkerId | None = SOURCE
        self.lease = 0
        self.log = PROMPT
        self.finished = False
        self.left = False
        self.outcomes: list[Outcome] = []
        self.handed_over = 0
        self.deadline: int | None = None
        names: dict[str, Any] = {"move": 1, "request": REQUEST, "source": SOURCE, "destination": DESTINATION}
        self.migration = Migration(Wish(**names, via=via, lease=1, after_first_token=after_first_token), 0.0)
        self.act(self.migration.happened(Sign.STARTED, 0.0))

    # -- the daemon

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Tell():
                    self.deadline = action.command.number
                    self.send(action.worker, action.command)
                case HandOver():
                    self.owner, self.lease = DESTINATION, action.lease
                    self.handed_over += 1
                case Finish():
                    self.outcomes.append(action.outcome)
                    self.deadline = None

    def send(self, worker: WorkerId, message: Any) -> None:
        if self.workers[worker].alive:
            self.workers[worker].inbox.append(message)

    def happened(self, sign: Sign) -> None:
        if self.migration.state is not MoveState.ENDED:
            self.act(self.migration.happened(sign, 0.0))

    def hear(self, name: WorkerId) -> None:
        """Have the daemon read one message of this worker."""
        outbox = self.workers[name].outbox
        if not outbox:
            return
        message = outbox.popleft()
        if isinstance(message, tuple):
            token, lease = message
            if self.owner == name and lease == self.lease and not self.finished:
                assert token == self.log, f"token {token} where {self.log} was due"
                self.log += 1
                if self.log == LENGTH:
                    self.finished = True
                    self.happened(Sign.GONE)
        else:
            self.act(self.migration.answered(message, 0.0))

    def pass_deadline(self) -> None:
        if self.deadline is not None and self.migration.number == self.deadline:
            self.deadline = None
            self.happened(Sign.LATE)

    def leave(self) -> None:
        """Disconnect the client."""
        if not self.finished:
            self.finished = self.left = True
            if self.owner is not None:
                self.send(self.owner, "abort")
            self.happened(Sign.GONE)

    def kill(self, name: WorkerId) -> None:
        """Kill the process; the daemon reads its earlier messages, and only then its death."""
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        worker.inbox.clear()
        while worker.outbox:
            self.hear(name)
        worker.copy, worker.room, worker.parked = None, False, None
        self.happened(Sign.SOURCE_LOST if name == SOURCE else Sign.DESTINATION_LOST)
        if self.owner == name:
            self.lease = 7
            other = DESTINATION if name == SOURCE else SOURCE
            self.owner = other if self.workers[other].alive else None
            if self.owner and not self.finished:
                self.send(self.owner, Copy(self.log, 7))

    # -- the workers

    def obey(self, name: WorkerId, *, willing: bool = True) -> None:
        """Have a worker carry out its next command; an unwilling one refuses what may be refused."""
        worker = self.workers[name]
        if not worker.inbox:
            return
        command = worker.inbox.popleft()
        if isinstance(command, say.MoveMessage) and not worker.order.is_next(REQUEST, command.move, command.number):
            return
        if command == "abort":
            worker.copy, worker.room, worker.parked = None, False, None
        elif isinstance(command, Copy):
            worker.copy, worker.room = command, False  # what a move had brought there is nobody's
        else:
            names = {"move": 1, "number": command.number, "request": REQUEST}
            if willing and getattr(command, "beyond", None) is not None:
                worker.parked = command
                self.look_again(worker)
                return
            answer = self._do(worker, command, names) if willing or self._must(command) else None
            is_copy = isinstance(command, say.CopyBlocks | say.AttachRequest) and not willing
            failure = say.CopyFailed if is_copy else say.CommandFailed
            worker.outbox.append(answer or failure(**names, reason="will not"))

    def _must(self, command: Any) -> bool:
        return isinstance(command, say.ThawRequest | say.ReleaseRequest | say.CancelReservation)

    def look_again(self, worker: Worker, *, is_late: bool = False) -> None:
        """Answer the parked command when it is due: a chunk, the first token, or five seconds."""
        command, copy = worker.parked, worker.copy
        if command is None:
            return
        names = {"move": 1, "number": command.number, "request": REQUEST}
        answer: Any = None
        if copy is None:
            answer = say.CommandFailed(**names, reason="it has ended")
        elif not copy.chunks_left and (copy.tokens <= PROMPT + 1 or copy.blocks == command.beyond):
            answer = self._do(worker, say.FreezeRequest(**names, via=Via.KV), names)
        elif is_late or copy.blocks != command.beyond:
            answer = self._do(worker, command, names)
        if answer is not None:
            worker.parked = None
            worker.outbox.append(answer)

    def _do(self, worker: Worker, command: Any, names: dict[str, Any]) -> Any:
        copy = worker.copy
        match command:
            case say.DescribeRequest() if copy is not None:
                facts = RequestFacts(copy.tokens, PROMPT, 0, (tuple(range(copy.blocks)),), 0, copy.chunks_left > 0)
                return say.RequestDescribed(**names, facts=facts)
            case say.ReserveBlocks() | say.WarmRequest():
                worker.room = True
                return say.RoomReserved(**names)
            case say.CopyBlocks() if worker.room:
                return say.BlocksCopied(**names, blocks=1, nbytes=10, copy_s=0.1)
            case say.FreezeRequest() if copy is not None and not copy.frozen:
                copy.frozen = True
                return say.RequestFrozen(**names)
            case say.AttachRequest() if worker.room:
                worker.room = False
                worker.copy = Copy(self.log, command.lease)
                return say.RequestAttached(**names, blocks=1, nbytes=10, copy_s=0.1)
            case say.ThawRequest():
                worker.parked = None
                if copy is not None:
                    copy.frozen = False
                return say.RequestThawed(**names)
            case say.ReleaseRequest():
                if copy is not None and copy.frozen:
                    worker.copy = None
                return say.RequestReleased(**names)
            case say.CancelReservation():
                worker.room = False
                if copy is not None and copy.lease == command.lease:
                    worker.copy = None
                return say.ReservationCancelled(**names)
        return None

    def step(self, name: WorkerId) -> None:
        """Have a worker compute a chunk or make a token, if it can."""
        worker = self.workers[name]
        copy = worker.copy
        if worker.alive and copy is not None and not copy.frozen and copy.tokens < LENGTH:
            copy.chunks_left = max(copy.chunks_left - 1, 0)
            if copy.chunks_left:
                self.look_again(worker)
                return
            worker.outbox.append((copy.tokens, copy.lease))
            copy.tokens += 1
            if copy.tokens == LENGTH:
                worker.copy = None
            self.look_again(worker)

    # -- a history

    def play(self, choice: int) -> None:
        """Play one possible event."""
        name = SOURCE if choice % 2 else DESTINATION
        match choice // 2:
            case 0 | 1 | 2:
                self.hear(name)
            case 3 | 4 | 5:
                self.obey(name)
            case 6:
                self.obey(name, willing=False)
            case 7 | 8:
                self.step(name)
            case 9:
                self.look_again(self.workers[SOURCE], is_late=True)
                if name == SOURCE:
                    self.pass_deadline()
            case 10:
                self.leave()
            case 11:
                self.kill(name)
            case 12:
                garble(self.workers[name].inbox, "lose")
            case 13:
                garble(self.workers[name].outbox, "lose")
            case 14 | 15:
                garble(self.workers[name].inbox, "repeat")
                garble(self.workers[name].outbox, "repeat")
            case 16:
                garble(self.workers[name].inbox, "swap")
            case 17:
                garble(self.workers[name].outbox, "swap")

    def advance(self, turns: int) -> None:
        """Continue without faults for that many commands or answers."""
        for _ in range(turns):
            if (heard := next((name for name, worker in self.workers.items() if worker.outbox), None)) is not None:
                self.hear(heard)
            elif (busy := next((name for name, worker in self.workers.items() if worker.inbox), None)) is not None:
                self.obey(busy)

    def settle(self) -> None:
        """Let everything in flight complete.  Nothing is computed for a client that has left."""
        for _ in range(200):
            for name in self.workers:
                self.hear(name)
                self.obey(name)
                if not self.left:
                    self.step(name)
            moving = [worker.copy and not (worker.copy.frozen or self.left) for worker in self.workers.values()]
            if not any(moving) and not any(worker.inbox or worker.outbox for worker in self.workers.values()):
                if self.migration.state is MoveState.ENDED:
                    return
                self.pass_deadline()
        raise AssertionError(f"it does not end: {self.migration.state}, {self.workers}")


def garble(wire: deque[Any], how: str) -> None:
    """Disturb a migration's messages on a wire: lose one, repeat one, or let the last overtake the one before.

    Tokens are left alone: an answer that has overtaken them would be another story (`StepDone` is numbered).
    """
    places = [place for place, message in enumerate(wire) if isinstance(message, say.MoveMessage)]
    if not places:
        return
    if how == "lose":
        del wire[places[-1]]
    elif how == "repeat":
        wire.append(wire[places[0]])
    elif len(places) > 1:
        here, there = places[-2:]
        wire[here], wire[there] = wire[there], wire[here]


CHOICES = 24
"""Without the wires' own faults."""
ALL_CHOICES = 36
