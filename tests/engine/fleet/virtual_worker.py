"""A worker process as its wire shows it, without a model: real frames, and tokens that count up.

A worker's next token is the number of tokens that its copy of the request has: a client that sees them count up has
lost none, and got none twice.  A request's blocks are known from its prompt alone; what does not fit is a fault of
those who sent it, and fails the test.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from melld.engine.host.fate import end_in_words
from melld.engine.host.ports import Ear
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer, FrameDecoder, encode_frame
from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.migration_book import CommandOrder
from melld.ids import RequestId
from melld.kvstore.geometry import KvGeometry
from melld.migrate import messages as say
from melld.migrate.snapshot import Phase, RequestFacts, Via

BLOCK_TOKENS, BLOCK_BYTES, BLOCKS, SLOTS = 1024, 1000, 6, 4
KEPT = (say.ThawRequest, say.ReleaseRequest, say.CancelReservation)
"""Commands that no worker refuses."""


class Words(msgspec.Struct, frozen=True):
    """A request, as the daemon's codec writes it."""

    request: str
    blocks: int
    length: int
    prefix_blocks: int = 0
    """Of its blocks, those that begin like everybody's."""
    priority: int = 0


class VirtualCodec:
    """Stand-in for vLLM's encoding."""

    def encode_request(self, core_request: Any) -> bytes:
        return msgspec.msgpack.encode(core_request.words)

    def decode_outputs(self, buffers: Any) -> Any:
        outputs = [
            SimpleNamespace(request_id=request, new_token_ids=tokens, finish_reason=finish)
            for request, tokens, finish in msgspec.msgpack.decode(buffers[0])
        ]
        return SimpleNamespace(outputs=outputs, scheduler_stats=None)


def prompt_tokens(words: Words) -> int:
    """Return so many that neither its output nor what is kept for it needs another block."""
    return words.blocks * BLOCK_TOKENS - BLOCK_TOKENS // 2


def core_request(words: Words) -> Any:
    """Return what vLLM's front end would hand to the fleet."""
    prompt = range(prompt_tokens(words))
    return SimpleNamespace(
        request_id=words.request,
        prompt_token_ids=prompt,
        prompt_embeds=None,
        pooling_params=None,
        priority=words.priority,
        words=words,
    )


@dataclass
class Copy:
    """A request on one worker."""

    words: Words
    tokens: int
    lease: int
    frozen: bool = False
    chunks_left: int = 0
    """Of its prompt, where it was computed here from its beginning: a block each."""


@dataclass
class VirtualWorker:
    """`inbox` holds unprocessed commands, `outbox` unread messages."""

    name: str
    ear: Ear
    ready: bool = False
    stopping: bool = False
    hung: bool = False
    computes: bool = False
    """While it hangs."""
    unkillable: bool = False
    ended: int | None = None
    copies: dict[str, Copy] = field(default_factory=dict)
    rooms: dict[str, Words] = field(default_factory=dict)
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[bytes] = field(default_factory=deque)
    gone: list[str] = field(default_factory=list)
    reports: int = 0
    order: CommandOrder = field(default_factory=CommandOrder)
    parked: dict[str, Any] = field(default_factory=dict)
    total_blocks: int = BLOCKS

    def told(self, message: Any, payload: list[bytes]) -> None:
        if isinstance(message, wire.Ping) and not self.hung:  # an I/O thread's, whatever the engine does
            self.say(wire.Pong(busy_s=0.0))
        elif self.ended is None:
            self.inbox.append((message, payload))

    # -- what it says

    def say(self, message: msgspec.Struct, *payload: bytes) -> None:
        self.outbox.append(b"".join(encode_frame(message, payload)))

    def deliver(self) -> None:
        """Have the daemon read one frame."""
        if self.outbox and self.ended is None:
            self.ear.received(self.outbox.popleft())

    def become_ready(self) -> None:
        if self.ready or self.ended is not None:
            return
        self.ready = True
        self.say(
            wire.WorkerReady(
                total_blocks=self.total_blocks, geometry=KvGeometry(BLOCK_TOKENS, BLOCK_BYTES),
                max_requests=SLOTS, supported_tasks=["generate"], load_s=0.0, ready_response=b"",
                kv_handle=b"memory",
            )
        )  # fmt: skip

    def die(self, exit_code: int = -signal.SIGKILL, heard: int = 0) -> None:
        """End the process; this many of its frames are read before that is known."""
        if self.ended is not None:
            return
        for _ in range(heard):
            self.deliver()
        self.ended = exit_code
        self.copies.clear()
        self.rooms.clear()
        self.ear.exited(end_in_words(exit_code, "from outside", ()), exit_code == -signal.SIGKILL)

    # -- what it does

    def obey(self, willing: bool = True) -> None:
        """Carry out the next command; an unwilling worker refuses what may be refused."""
        if not self.inbox or self.hung or self.ended is not None or not (self.ready or self.stopping):
            return
        message, payload = self.inbox.popleft()
        match message:
            case wire.StopWorker():
                self.stopping = True
                self.die(0, len(self.outbox))
            case wire.AddRequest():
                words = msgspec.msgpack.decode(payload[0], type=Words)
                self._enter(Copy(words, 0, message.lease, chunks_left=words.blocks))
            case wire.ResumeRequest():
                self.say(wire.RequestTaken(request=message.request, lease=message.lease))
                self._forget(message.request)
                self._enter(_copy_of(payload[0], msgspec.msgpack.decode(payload[1]), message.lease))
            case wire.AbortRequests():
                for request in message.requests:
                    self._forget(request)
                self.report()
            case wire.OpenLink():
                self.say(wire.LinkOpened(peer=message.peer, transport="memory", bytes_per_s=1e9))
            case wire.Doze():
                self.say(wire.Dozed(resident_bytes=7, failure="" if willing else "will not"))
            case wire.Wake():
                self.ready, self.reports = False, 0
                self.become_ready()
            case wire.CloseLink():
                self.say(wire.LinkClosed(peer=message.peer))
            case say.MoveMessage():
                self._move(message, payload, willing)

    def step(self) -> None:
        """Make one chunk or token of each active request; the last chunk brings the first token."""
        if self.hung or self.ended is not None:
            return
        tokens, outputs, leases = {}, [], {}
        for copy in [copy for copy in self.copies.values() if not copy.frozen]:
            request = copy.words.request
            copy.chunks_left = max(copy.chunks_left - 1, 0)
            if copy.chunks_left:
                continue
            ends = copy.tokens + 1 == copy.words.length
            if ends:
                outputs.append((request, [copy.tokens], "length"))
            else:
                tokens[RequestId(request)] = [copy.tokens]
            copy.tokens += 1
            if copy.lease:
                leases[request] = copy.lease
            if ends:
                self._forget(request)
        if tokens or outputs:
            self.report(outputs, leases, tokens)
        for command in list(self.parked.values()):
            self._look_again(command)

    @property
    def used_blocks(self) -> int:
        prefix_blocks = [words.prefix_blocks for words in self._held]
        return self._named_blocks - sum(prefix_blocks) + max(prefix_blocks, default=0)

    @property
    def _named_blocks(self) -> int:
        return sum(words.blocks for words in self._held)

    @property
    def _held(self) -> list[Words]:
        return [*(copy.words for copy in self.copies.values()), *self.rooms.values()]

    def _enter(self, copy: Copy) -> None:
        self.copies[copy.words.request] = copy
        self._check_room()
        self.report()

    def _check_room(self) -> None:
        assert self.used_blocks <= self.total_blocks, (
            f"{self.name} was given more than it holds: {self.copies} {self.rooms}"
        )
        assert len(self.copies) + len(self.rooms) <= SLOTS, f"{self.name} was given more than it has slots"

    def _forget(self, request: str) -> None:
        self.rooms.pop(request, None)
        self.parked.pop(request, None)
        if self.copies.pop(request, None) is not None:
            self.gone.append(request)

    def report(
        self,
        outputs: Sequence[Any] = (),
        leases: dict[str, int] | None = None,
        tokens: dict[RequestId, list[int]] | None = None,
    ) -> None:
        held = {request: (copy.words.blocks, Phase.DECODING) for request, copy in self.copies.items()}
        self.reports += 1
        gone, self.gone = [request for request in self.gone if request not in held], []
        used_blocks = self.used_blocks
        blocks = wire.BlockReport(used_blocks, self.total_blocks, self._named_blocks - used_blocks, held)
        done = wire.StepDone(self.reports, 0.01, blocks, leases or {}, gone, tokens=tokens or {})
        self.say(done, *([msgspec.msgpack.encode(outputs)] if outputs else []))

    # -- migrations

    def _move(self, command: Any, payload: list[bytes], willing: bool) -> None:
        if not self.order.is_next(command.request, command.move, command.number):
            return
        if getattr(command, "beyond", None) is not None and willing and command.request in self.copies:
            self.parked[command.request] = command
            self._look_again(command)
            return
        names = _names(command)
        answer = self._obey_move(command, payload, names) if willing or isinstance(command, KEPT) else None
        if answer is None:
            is_copy = isinstance(command, say.CopyBlocks | say.AttachRequest) and not willing
            answer = (say.CopyFailed if is_copy else say.CommandFailed)(**names, reason="will not"), ()
        message, rest = answer
        self.say(message, *rest)
        if isinstance(command, (*KEPT, say.AttachRequest)):
            self.report()

    def _look_again(self, command: Any) -> None:
        """Answer a parked command once there is a chunk or the first token; report what came after it."""
        copy, names = self.copies[command.request], _names(command)
        is_new = copy.words.blocks - copy.chunks_left != command.beyond
        if not copy.chunks_left and (copy.tokens <= 1 or not is_new):
            answer = self._obey_move(say.FreezeRequest(**names, via=Via.KV), [], names)
        elif is_new:
            answer = self._obey_move(command, [], names)
        else:
            return
        del self.parked[command.request]
        self.say(answer[0], *answer[1])

    def _obey_move(self, command: Any, payload: list[bytes], names: dict[str, Any]) -> Any:
        request = command.request
        copy = self.copies.get(request)
        match command:
            case say.DescribeRequest() if copy is not None:
                ids = (tuple(range(copy.words.blocks - copy.chunks_left)),)
                prompt = prompt_tokens(copy.words)
                facts = RequestFacts(prompt + copy.tokens, prompt, 0, ids, 0, copy.chunks_left > 0)
                return say.RequestDescribed(**names, facts=facts), ()
            case say.ReserveBlocks() | say.WarmRequest() if copy is None:
                self.rooms[request] = msgspec.msgpack.decode(payload[0], type=Words)
                self._check_room()
                return say.RoomReserved(**names), ()
            case say.CopyBlocks() if request in self.rooms:
                return say.BlocksCopied(**names, blocks=1, nbytes=10, copy_s=0.01), ()
            case say.FreezeRequest() if copy is not None and not copy.frozen:
                copy.frozen = True
                words = msgspec.msgpack.encode(copy.words)
                snapshot = msgspec.msgpack.encode((words, list(range(copy.tokens))))  # ours alone to read
                return say.RequestFrozen(**names), (snapshot,)
            case say.AttachRequest() if request in self.rooms:
                del self.rooms[request]
                self.copies[request] = _copy_of(*msgspec.msgpack.decode(payload[0]), command.lease)
                return say.RequestAttached(**names, blocks=1, nbytes=10, copy_s=0.01), ()
            case say.ThawRequest():
                self.parked.pop(request, None)
                if copy is not None:
                    copy.frozen = False
                return say.RequestThawed(**names), ()
            case say.ReleaseRequest():
                if copy is not None and copy.frozen:
                    self._forget(request)
                return say.RequestReleased(**names), ()
            case say.CancelReservation():
                self.rooms.pop(request, None)
                if copy is not None and copy.lease == command.lease:
                    self._forget(request)
                return say.ReservationCancelled(**names), ()
        return None


def _names(command: Any) -> dict[str, Any]:
    return {"move": command.move, "number": command.number, "request": command.request}


def _copy_of(words: bytes, tokens: list[int], lease: int) -> Copy:
    return Copy(msgspec.msgpack.decode(words, type=Words), len(tokens), lease)


class VirtualChild:
    """The daemon's end of a virtual worker."""

    def __init__(self, worker: VirtualWorker) -> None:
        self._worker = worker
        self._decoder = FrameDecoder(wire.ToWorker)
        self._idle_looks = 0

    def write(self, buffers: Sequence[Buffer]) -> None:
        for message, payload in self._decoder.feed(b"".join(buffers)):
            self._worker.told(message, payload)

    def kill(self) -> None:
        if not self._worker.unkillable:
            asyncio.get_running_loop().call_soon(self._worker.die)

    def hold(self, holds: bool) -> None:
        pass

    def look(self, reach: Reach) -> Standstill:
        self._idle_looks = self._idle_looks + 1 if self._worker.hung and not self._worker.computes else 0
        return Standstill(idle_looks=self._idle_looks)


class VirtualHost:
    """Makes workers at once.  `workers` has the latest of each name."""

    def __init__(self) -> None:
        self.workers: dict[str, VirtualWorker] = {}
        self.is_lost = False

    def spawn(self, spec: WorkerSpec, ear: Ear) -> VirtualChild:
        if self.is_lost:
            raise OSError("the machine is lost")
        asyncio.get_running_loop().call_soon(ear.forked, 0)
        worker = self.workers[spec.worker] = VirtualWorker(spec.worker, ear)
        return VirtualChild(worker)
