"""Daemon <-> worker frames: what is said, and how it lies on the socket.

Owns the messages and their framing, without I/O.  A frame is a head (one of the Structs below, as MessagePack) and any
number of payload buffers, which only vLLM's own encoder and decoder read (`EngineCoreRequest`, `EngineCoreOutputs`).

    uint32 n | n times uint32 length | head | n-1 buffers          little-endian

The wire is one end each of a socket pair that the daemon made for this very process: nobody else can write to it, and
its end of file is the other side's death.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from melld.migrate.migration_messages import MoveAnswer, MoveCommand
from melld.migrate.snapshot import Phase

Buffer = bytes | bytearray | memoryview
_COUNT = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class CopyRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker copies KV from its siblings (`[migration]`)."""

    checksum: bool = False
    """Whether what has arrived is compared with what was to be read."""
    bytes_per_s: float | None = None
    """The most over one link in a second; None: no limit."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker process is told at its birth."""

    worker: str
    model_path: str
    device_kind: str
    """`cuda` or `cpu`."""
    visible_devices: tuple[str, ...] = ()
    """CUDA: UUIDs, this worker's own first, then its peers', so that their memory can be mapped."""
    engine_arguments: dict[str, Any] = {}
    """vLLM's engine arguments by name (`vllm.engine.arg_utils.AsyncEngineArgs`)."""
    environment: dict[str, str] = {}
    parent_pid: int = 0
    """The process that it must not outlive: the template, which must not outlive the daemon."""
    copy_rules: CopyRules = CopyRules()


class Message(msgspec.Struct, frozen=True, tag=True):
    """The head of a frame."""


# -- daemon to worker ------------------------------------------------------------------------------------------------


class AddRequest(Message, frozen=True, tag=True):
    """Run this request.  Payload: vLLM's `EngineCoreRequest`.  `lease` marks every output that it gives here."""

    request: str
    lease: int


class ResumeRequest(Message, frozen=True, tag=True):
    """Go on with a request whose worker has died.  Payload: a `RequestSnapshot` made from the daemon's token log."""

    request: str
    lease: int


class AbortRequests(Message, frozen=True, tag=True):
    """Free these requests at once; nothing more is wanted of them.  Unknown ones are ignored."""

    requests: list[str]


class CallUtility(Message, frozen=True, tag=True):
    """Call one of `UTILITIES` on the engine between two steps; exactly one `UtilityDone` answers."""

    call: int
    method: str
    arguments: list[Any]


WANTED = "the worker was wanted"
"""Why a measurement was given up: requests come first."""


class MeasurePrefill(Message, frozen=True, tag=True, kw_only=True):
    """How much foreign prefill is bearable while `batch` requests decode?  One `UtilityDone` of `PrefillMeasured`.

    `share`: by how much the median step may become longer.  `seconds`: begin nothing more after so long.
    """

    call: int
    batch: int
    share: float
    seconds: float


class MeasureLink(Message, frozen=True, tag=True, kw_only=True):
    """Copy blocks of this sibling for so long, into blocks that nobody holds.  One `UtilityDone` of `LinkMeasured`."""

    call: int
    peer: str
    blocks: int
    """How many the sibling has."""
    seconds: float


class OpenLink(Message, frozen=True, tag=True):
    """Open this sibling's KV memory, for copies from there to here.  Payload: its `WorkerReady.kv_handle`."""

    peer: str


class CloseLink(Message, frozen=True, tag=True):
    """That sibling's process is gone: give its KV memory up, which is not free for others before."""

    peer: str


class Ping(Message, frozen=True, tag=True):
    """Are you there, and do you step?  Answered by an I/O thread with a `Pong`."""


class StopWorker(Message, frozen=True, tag=True):
    """End in good order: requests still here are forgotten."""


# -- worker to daemon ------------------------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True, tag=True, kw_only=True):
    """The engine is up and has produced a real token."""

    pid: int
    total_blocks: int
    block_tokens: int
    block_bytes: int
    max_model_tokens: int
    max_requests: int
    """vLLM's `max_num_seqs`: requests that run at once."""
    supported_tasks: list[str]
    vllm_version: str
    load_s: float
    ready_response: bytes
    """vLLM's `EngineCoreReadyResponse`, which syncs what was settled at start into the daemon's `VllmConfig`."""
    kv_handle: bytes = b""
    """How a sibling finds its KV memory (`migrate/transports`); empty where it cannot be shared."""


class StepDone(Message, frozen=True, tag=True):
    """What has changed, mostly by one engine step.  Payload, if any: vLLM's `EngineCoreOutputs`."""

    step: int
    """Counts these messages."""
    step_s: float
    used_blocks: int
    total_blocks: int
    blocks: dict[str, tuple[int, int, int, int, Phase]]
    """request -> (blocks, computed tokens, prompt tokens, output tokens, phase): those that changed."""
    leases: dict[str, int]
    """request -> lease, for outputs of requests whose lease is not 0."""
    gone: list[str]
    """Requests that this worker no longer holds, since the last such message."""


class RequestTaken(Message, frozen=True, tag=True):
    """The worker has read a `ResumeRequest`, and is about to go on with it: should it die now, that may be why."""

    request: str
    lease: int


class UtilityDone(Message, frozen=True, tag=True):
    """The answer to `CallUtility`; `error` is None when it worked."""

    call: int
    result: Any = None
    error: str | None = None


class PrefillMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """So many tokens of prefill in so many seconds; `step_s` is a step without them, 0 where nobody decoded."""

    tokens: float
    seconds: float
    step_s: float


class LinkMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """So many bytes came in so many seconds."""

    nbytes: int
    seconds: float


class LinkOpened(Message, frozen=True, tag=True, kw_only=True):
    """Copies from that sibling are possible, or `failure` says why not."""

    peer: str
    transport: str = ""
    bytes_per_s: float = 0.0
    failure: str = ""


class Pong(Message, frozen=True, tag=True):
    """`steps` ended so far; `busy_s` since the step that runs now began, 0 when none does; `requests` held."""

    steps: int
    busy_s: float
    requests: int


class RequestRejected(Message, frozen=True, tag=True):
    """The engine could not take the request; it is not there."""

    request: str
    reason: str


class WorkerFailed(Message, frozen=True, tag=True):
    """The worker is about to end because of this."""

    reason: str
    traceback: str


ToWorker = (
    AddRequest
    | ResumeRequest
    | AbortRequests
    | CallUtility
    | MeasurePrefill
    | MeasureLink
    | OpenLink
    | CloseLink
    | MoveCommand
    | Ping
    | StopWorker
)
ToDaemon = (
    WorkerReady
    | StepDone
    | UtilityDone
    | LinkOpened
    | MoveAnswer
    | Pong
    | RequestTaken
    | RequestRejected
    | WorkerFailed
)

# What the daemon may call on an engine (vllm.v1.engine.core.EngineCore), and nothing else.
UTILITIES = frozenset({"get_supported_tasks", "reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache"})

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to write, in order, for `message` and its payload."""
    head = _encoder.encode(message)
    lengths = [len(head), *(memoryview(buffer).nbytes for buffer in payload)]
    return [struct.pack(f"<I{len(lengths)}I", len(lengths), *lengths), head, *payload]


class FrameDecoder:
    """Bytes in, frames out: (head, payload buffers).  Knows nothing of sockets.

    Raises:
        msgspec.ValidationError: a head that is none of the expected messages.
        ValueError: a frame larger than any that is ever sent: the stream is out of step.
    """

    def __init__(self, messages: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> Iterator[tuple[Any, list[bytes]]]:
        """Every frame that is complete once `data` has come."""
        buffer = self._buffer
        buffer += data
        position = 0
        while (parts := _part_lengths(buffer, position)) is not None:
            start = position + 4 * (1 + len(parts))
            end = start + sum(parts)
            if len(buffer) < end:
                break
            payload = []
            for length in parts:
                payload.append(bytes(memoryview(buffer)[start : start + length]))
                start += length
            position = end
            yield self._decoder.decode(payload[0]), payload[1:]
        if position:
            del buffer[:position]


def _part_lengths(buffer: bytearray, position: int) -> tuple[int, ...] | None:
    """The lengths of the parts of the frame at `position`, or None while they have not come in full."""
    if len(buffer) - position < 4:
        return None
    (count,) = _COUNT.unpack_from(buffer, position)
    if not 1 <= count <= 4096:
        raise ValueError(f"a frame of {count} parts: the stream is out of step")
    if len(buffer) - position < 4 * (1 + count):
        return None
    lengths = struct.unpack_from(f"<{count}I", buffer, position + 4)
    if sum(lengths) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {sum(lengths)} bytes: the stream is out of step")
    return lengths
