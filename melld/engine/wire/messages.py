"""Daemon <-> worker: what is said.

Owns the messages, without I/O; `frames` has how they lie on the socket.  Some come with payload buffers, which only
vLLM's own encoder and decoder read (`EngineCoreRequest`, `EngineCoreOutputs`).

The wire is one end each of a socket pair that the daemon made for this very process: nobody else can write to it, and
its end of file is the other side's death.
"""

from typing import Any

import msgspec

from melld.migrate.messages import MoveAnswer, MoveCommand
from melld.migrate.snapshot import Phase


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
    kv_failure: str = ""
    """Why it cannot; its requests move by their tokens."""


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
    shared_blocks: int = 0
    """By how many `used_blocks` is smaller than the sum of all block tables: a shared block is used once."""


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


class WorkerLoading(Message, frozen=True, tag=True):
    """How far the worker is on its way to `WorkerReady`, in words for people."""

    stage: str


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
    | WorkerLoading
    | WorkerFailed
)

# What the daemon may call on an engine (vllm.v1.engine.core.EngineCore), and nothing else.
UTILITIES = frozenset({"get_supported_tasks", "reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache"})
