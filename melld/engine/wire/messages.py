"""Messages between daemon and worker.

Owns the messages, without I/O; `frames` owns their framing.  Some come with payload buffers, which only
vLLM's own encoder and decoder read (`EngineCoreRequest`, `EngineCoreOutputs`).

The wire is a socket pair that the daemon made for this process alone: nobody else can write to it, and end of file
means that the other side has ended.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId
from melld.kvstore.geometry import KvGeometry
from melld.migrate.messages import MoveAnswer, MoveCommand
from melld.migrate.snapshot import Phase


class Message(msgspec.Struct, frozen=True, tag=True):
    """The head of a frame."""


# -- daemon to worker ------------------------------------------------------------------------------------------------


class AddRequest(Message, frozen=True, tag=True):
    """Run this request.  Payload: vLLM's `EngineCoreRequest`.  `lease` marks each of its outputs from this worker.

    `cause`: the event on which it was placed here.
    """

    request: str
    lease: int
    cause: EventId = NO_EVENT


class ResumeRequest(Message, frozen=True, tag=True):
    """Resume a request that has left its worker.  Payload: as for `ReserveBlocks`.

    `cause`: the event on which it was placed here.
    """

    request: str
    lease: int
    cause: EventId = NO_EVENT


class AbortRequests(Message, frozen=True, tag=True):
    """Abort these requests and free their blocks at once.  Unknown ids are ignored."""

    requests: list[str]
    may_return: bool = False
    """They may resume on this worker."""


class LoadAdapter(Message, frozen=True, tag=True):
    """Load this adapter, a `LoRARequest` of vLLM's.  One `UtilityDone` of whether it was loaded."""

    call: int
    adapter: Any


class OpenLink(Message, frozen=True, tag=True):
    """Open this sibling's KV memory, for copies to this worker.  Payload: its `WorkerReady.kv_handle`."""

    peer: str


class CloseLink(Message, frozen=True, tag=True):
    """End the copies from a sibling whose process has ended, and unmap its KV memory.  `LinkClosed` answers."""

    peer: str


class GrantGranules(Message, frozen=True, tag=True):
    """Use these granules of the arena for KV.  All their bytes are zero."""

    granules: tuple[int, ...]
    cause: EventId = NO_EVENT


class TakeGranules(Message, frozen=True, tag=True):
    """Return this many granules of the arena, or as many as can be freed by then.  One `GranulesReturned`."""

    take: int
    granules: int
    deadline_s: float
    cause: EventId = NO_EVENT


class Doze(Message, frozen=True, tag=True):
    """Return all granules and release the weights, as soon as nothing runs.  One `Dozed`."""


class StopDozing(Message, frozen=True, tag=True):
    """Answer a `Doze` at once, with what has been freed: the model is wanted.  May come repeatedly, or late."""


class Wake(Message, frozen=True, tag=True):
    """Reload the weights, without a link or a granule.  `WorkerReady` answers, and reports restart at 1."""


class Ping(Message, frozen=True, tag=True):
    """Check that the worker is alive.  An I/O thread answers with a `Pong`.  `at_s`: the daemon's monotonic clock."""

    at_s: float


class StopWorker(Message, frozen=True, tag=True):
    """Stop cleanly, and drop the remaining requests."""


# -- worker to daemon ------------------------------------------------------------------------------------------------


def generates(tasks: Iterable[str]) -> bool:
    """Return True if one of vLLM's tasks makes a model write tokens."""
    return not {"generate", "transcription"}.isdisjoint(tasks)


class WorkerReady(Message, frozen=True, tag=True, kw_only=True):
    """The engine is up and has produced a real token."""

    total_blocks: int
    geometry: KvGeometry
    max_requests: int
    """Requests that vLLM runs at once: its `max_num_active_seqs`, else `max_num_seqs`."""
    supported_tasks: list[str]
    load_s: float
    moves: str = ""
    """How requests of the model move, in words: `kvstore.kept.moves_text`."""
    caches_prefixes: bool = False
    """True if it keeps the KV of ended requests for later ones that begin alike."""
    ready_response: bytes
    """vLLM's `EngineCoreReadyResponse`, which syncs what was settled at start into the daemon's `VllmConfig`."""
    kv_handle: bytes = b""
    """Handle of its KV memory for siblings (`migrate/transports`); empty if it cannot be shared."""
    kv_failure: str = ""
    """Why it cannot be shared; its requests then move by recomputing tokens."""
    far_kv_handle: bytes = b""
    """Handle of its KV memory for workers of other machines; empty if it is not for them."""
    far_kv_failure: str = ""
    """Why it is not for them though it should be."""
    arena_failure: str = ""
    """Why it cannot have its KV in an arena; it then has its own memory for it."""
    resident_bytes: int = 0
    """Memory of its process beside KV: the model's weights, and all else."""

    @property
    def generates(self) -> bool:
        """Return True if the model writes tokens; else it pools: it embeds, scores or classifies."""
        return generates(self.supported_tasks)


class BlockReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of a worker's KV blocks."""

    used_blocks: int
    total_blocks: int
    """Blocks that it may use: with an arena, those whose granules it was granted; vLLM's null block is none of them."""
    shared_blocks: int
    """Difference between the sum of all block tables and `used_blocks`, in which a shared block counts once."""
    changed: dict[str, tuple[int, Phase]]
    """request -> blocks and phase: those that changed."""


class StepDone(Message, frozen=True, tag=True):
    """Changes since the last report, mostly of one engine step.

    Payload, if any: vLLM's `EngineCoreOutputs` of the requests for which the step made more than the next tokens.
    """

    step: int
    """Consecutive number of the report."""
    step_s: float
    blocks: BlockReport
    leases: dict[str, int]
    """request -> lease, for outputs of requests whose lease is not 0."""
    gone: list[str]
    """Requests that this worker no longer holds, since the last such message."""
    decodes: int = 0
    """Requests that this step computed one token for."""
    prompt_tokens: int = 0
    """Tokens that it computed for others."""
    timestamp_s: float = 0.0
    """When its tokens were made, by the clock of vLLM's outputs."""
    tokens: dict[RequestId, list[int]] = {}
    """request -> tokens, where that is all the step made for it."""


class RequestTaken(Message, frozen=True, tag=True):
    """The worker has read a `ResumeRequest` and is about to run it: if it dies now, the request may be the cause."""

    request: str
    lease: int


class UtilityDone(Message, frozen=True, tag=True):
    """The answer to a message with a `call`; `error` is None when it worked."""

    call: int
    result: Any = None
    error: str | None = None


class LinkOpened(Message, frozen=True, tag=True, kw_only=True):
    """The link from that sibling is open, or `failure` says why it is not."""

    peer: str
    transport: str = ""
    bytes_per_s: float = 0.0
    """Measured with a few blocks when the link was opened."""
    failure: str = ""


class LinkClosed(Message, frozen=True, tag=True):
    """No copy reads that sibling's KV memory any longer."""

    peer: str


class GranulesReturned(Message, frozen=True, tag=True, kw_only=True):
    """The answer to that `TakeGranules`: these granules are returned, and all their bytes are zero."""

    take: int
    granules: tuple[int, ...]
    moved_blocks: int = 0
    """Blocks of running requests that were moved out of them."""
    cause: EventId = NO_EVENT


class Dozed(Message, frozen=True, tag=True):
    """The answer to `Doze`: all granules are free and read as zeros, and the process holds `resident_bytes`.

    `failure`: why it cannot doze; it then serves on.
    """

    resident_bytes: int = 0
    failure: str = ""


class Pong(Message, frozen=True, tag=True):
    """Answer to a `Ping`: `busy_s` since the start of the running step (0: none)."""

    busy_s: float


class RequestRejected(Message, frozen=True, tag=True):
    """The engine refused the request and does not hold it.  `cause`: as in the message that it answers."""

    request: str
    reason: str
    cause: EventId = NO_EVENT


class WorkerLoading(Message, frozen=True, tag=True):
    """Progress towards `WorkerReady`, as text."""

    stage: str


class WorkerFailed(Message, frozen=True, tag=True):
    """The worker is about to exit because of this error."""

    reason: str
    traceback: str


_OfRequests = AddRequest | ResumeRequest | AbortRequests | MoveCommand
_OfMemory = OpenLink | CloseLink | GrantGranules | TakeGranules | Doze | StopDozing | Wake
ToWorker = _OfRequests | _OfMemory | LoadAdapter | Ping | StopWorker
_AboutRequests = StepDone | RequestTaken | RequestRejected | MoveAnswer
_AboutMemory = LinkOpened | LinkClosed | GranulesReturned | Dozed
ToDaemon = _AboutRequests | _AboutMemory | UtilityDone | Pong | WorkerLoading | WorkerReady | WorkerFailed
