"""The daemon's state, as `melld status --json` prints it and the control socket answers it.

Owns the shapes alone, which are a promise to scripts: while `schema` stays the same, fields may be added, but neither
renamed nor given another meaning.  `docs/status-schema.md` is generated from this file.  Never gathers anything.

An unknown value is null, never 0.
"""

import enum
from collections.abc import Sequence

import msgspec

from melld.migrate.snapshot import Phase

SCHEMA = 1


class DaemonState(enum.StrEnum):
    """The state of the daemon."""

    STARTING = "starting"  # no worker has produced a token yet
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes its running requests, takes no new ones
    STOPPING = "stopping"  # its workers are ending


class WorkerState(enum.StrEnum):
    """The state of a worker."""

    STARTING = "starting"  # its process loads the model; no token yet
    READY = "ready"  # runs requests
    DRAINING = "draining"  # finishes or hands over its requests, takes no new ones
    ASLEEP = "asleep"  # has no requests and is not needed now; its process waits, and can serve at once
    STOPPING = "stopping"  # its process is ending: it is not needed, or an operator wants its device
    WAKING = "waking"  # on its way from stopped to ready; requests placed on it wait
    DRAINED = "drained"  # has no process, as an operator wants its device; `melld resume` starts it
    STOPPED = "stopped"  # has no process; started when needed, or by an operator
    FAILED = "failed"  # its process died or would not start; the reason says what comes next


SERVING = frozenset(
    {WorkerState.READY, WorkerState.ASLEEP, WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.WAKING}
)
"""States in which a worker runs requests or can be woken for one."""
RESTING = frozenset({WorkerState.ASLEEP, WorkerState.STOPPING, WorkerState.STOPPED})
"""The serving states in which a worker is not needed now."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its device."""

    worker: str
    """The worker's name."""
    model: str = ""
    """The model that it serves."""
    device: str
    """Its device: `cuda:0`, `cpu:1`."""
    device_name: str | None = None
    """Model name of the device: `NVIDIA H200`."""
    state: WorkerState
    """Its state."""
    reason: str = ""
    """Reason for that state, or why a reading of its device is missing.  Empty when all is well."""
    pid: int | None = None
    """Process id; null if it has no process."""
    capacity_bytes: int = 0
    """Bytes of KV cache for all its requests together.  0 until it has been ready."""
    used_bytes: int = 0
    """Bytes of the KV blocks in use, each block counted once, however many requests share it."""
    total_blocks: int = 0
    """KV blocks in total."""
    used_blocks: int = 0
    """KV blocks in use.  Blocks held by the prefix cache alone count as free."""
    reserved_blocks: int = 0
    """KV blocks reserved for requests on their way here."""
    running_requests: int = 0
    """Requests in its running batch."""
    waiting_requests: int = 0
    """Requests placed on it that it has not begun, or has preempted."""
    max_requests: int = 0
    """Limit of requests that it runs at once."""
    tokens_per_s: float = 0.0
    """Output tokens a second, over the last few seconds."""
    step_ms: float | None = None
    """Median duration of its latest steps in milliseconds; null before the first step."""
    memory_bytes: int | None = None
    """Device memory in use by any process, in bytes; on a CPU device, the resident memory of the worker's process."""
    memory_total_bytes: int | None = None
    """Total memory of the device, in bytes."""
    power_w: float | None = None
    """Power draw of the device in watts."""
    temperature_c: int | None = None
    """The device's temperature in degrees Celsius."""
    utilisation: float | None = None
    """Share of the last period in which the device was busy, 0 to 1; on a CPU device, of one core."""
    restarts: int = 0
    """Restarts of its process since the daemon started."""
    size_class: str | None = None
    """Size of its largest request by its capacity: `T` up to a quarter, `S` a third, `M` a half, `L` more; or null."""
    why: str = ""
    """Why it is awake or not: requests, what it was woken for, when it will sleep, the progress of its drain."""


def workers_ready(workers: Sequence[WorkerStatus]) -> str:
    """Return a text on how many workers serve, including those at rest, which are woken when needed."""
    serving = [worker.state for worker in workers if worker.state in SERVING]
    resting = sum(state in RESTING for state in serving)
    return f"{len(serving)} of {len(workers)} workers ready" + (f" ({resting} at rest)" if resting else "")


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request: one sequence that is being prefilled or decoded, or waits."""

    request: str
    """The request's id: the client's, with a suffix for each sequence of one call."""
    model: str = ""
    """The model that it asks."""
    worker: str | None = None
    """The worker that runs it; null while it is queued because no worker has room."""
    phase: Phase
    """What its worker does with it."""
    prompt_tokens: int
    """Tokens in its prompt."""
    output_tokens: int = 0
    """Tokens generated so far."""
    kv_bytes: int = 0
    """Bytes of the KV blocks in its block table; a shared block counts for each request."""
    blocks: int = 0
    """KV blocks in its block table."""
    age_s: float
    """Seconds since it arrived."""
    moves: int = 0
    """Moves to another worker so far."""
    pinned: bool = False
    """True if an operator has sent it to its worker or destination: it stays until that worker drains or ends."""
    moving_to: str | None = None
    """Destination of its current move; null if it is not moving."""
    moving_step: str | None = None
    """Step of its current move: `copying`, `freezing`; null if it is not moving."""


class MovingState(enum.StrEnum):
    """The state of a move."""

    RUNNING = "running"  # its KV is being copied, or its tokens recomputed
    DEFERRED = "deferred"  # waits, as the boundaries of links and workers are used up


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One move that the scheduler has decided and that is not over.  Its request counts on both workers."""

    request: str
    """The request's id."""
    source: str
    """The worker that runs it."""
    destination: str
    """The worker that it moves to."""
    state: MovingState
    """Running, or deferred."""
    via: str | None = None
    """`kv` or `tokens`; null until it begins."""
    kv_bytes: int
    """Size of the request's KV in bytes."""
    cause: str
    """Reason for the move, in a word or two: `overload`, `drain`, `operator`."""
    deferred_because: str = ""
    """Why it has not begun; empty once it has."""
    age_s: float
    """Seconds since the decision."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one worker to another, between workers that have a process."""

    source: str
    """The worker that requests leave."""
    destination: str
    """The worker that requests go to."""
    transport: str | None = None
    """Transport that copies KV: `shared_memory`, `cuda_peer`, `cuda_staged`; null if KV cannot be copied."""
    bytes_per_s: float | None = None
    """Rate measured with a few blocks when the link was opened; null if not measured."""
    tokens_only_because: str = ""
    """Why requests can only be recomputed from their tokens; empty if KV can be copied."""


class ModelState(enum.StrEnum):
    """The state of a model."""

    LOADED = "loaded"  # a worker has it in memory
    LOADING = "loading"  # its first worker starts; requests wait for it
    UNLOADED = "unloaded"  # no worker has it in memory; the next request starts one
    FAILED = "failed"  # it cannot be served; the reason says why


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    model: str
    """Its name: the first of `names`."""
    names: tuple[str, ...]
    """All that clients may call it."""
    state: ModelState
    """Its state."""
    reason: str = ""
    """Why it cannot be served; empty if it can."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are promised, and the part of them that got it since the daemon started; null before any ended.

    Requests sent away for want of room missed both targets.
    """

    itl_target_ms: float | None = None
    """Longest mean time between two tokens of a request; null if none is promised."""
    ttft_target_s: float = 0.0
    """Longest time until a request's first token; four times its prompt's computing, if that is longer."""
    requests: int = 0
    """Requests judged."""
    attainment: float | None = None
    """Part of the requests that met both targets."""
    ttft_attainment: float | None = None
    """Part whose first token came in time."""
    itl_attainment: float | None = None
    """Part whose tokens kept pace."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's present state."""

    schema: int = SCHEMA
    """The version of this schema."""
    melld_version: str
    """Version of melld."""
    vllm_version: str
    """Version of vLLM."""
    pid: int
    """Process id of the daemon."""
    model: str
    """Name of the first served model: the first of `models`."""
    models: tuple[str, ...] = ()
    """All names of the first served model."""
    served: tuple[ModelStatus, ...] = ()
    """All served models, in the order of the configuration."""
    state: DaemonState
    """State of the daemon."""
    uptime_s: float
    """Seconds since the daemon started."""
    url: str
    """Address of the API: `http://127.0.0.1:8000`."""
    policy: str
    """The scheduling policy that places requests."""
    queued_requests: int = 0
    """Requests that no worker has room for yet."""
    warnings: tuple[str, ...] = ()
    """Warnings for the operator, each in one sentence."""
    workers: tuple[WorkerStatus, ...] = ()
    """All workers, in the order of the configuration."""
    preemptions: int = 0
    """Preemptions for lack of KV blocks since the daemon started."""
    worker_seconds_awake: float = 0.0
    """Seconds that workers were awake since the daemon started, summed."""
    gpu_hours_saved: float = 0.0
    """Hours that workers slept or were stopped since the daemon started, summed."""
    service: ServiceStatus = ServiceStatus()
    """Targets, and how many requests were served within them."""
    boundaries: str = ""
    """Limits of links and workers for moves, in one line; `melld profile --show --json` has the figures."""
    links: tuple[LinkStatus, ...] = ()
    """One entry for each ordered pair of workers."""
    async_scheduling: str = ""
    """Whether workers schedule a step while the last one is computed, on or off, and why."""
    moves: tuple[MoveStatus, ...] = ()
    """All moves decided and not over, in the order of the decisions."""
    requests: tuple[RequestStatus, ...] = ()
    """All unfinished requests: those on workers first, then the queue in its order."""
