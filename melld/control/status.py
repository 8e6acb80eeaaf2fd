"""The daemon's state, as `melld status --json` prints it and the control socket answers it.

Owns the shapes alone, which are a promise to scripts: while `schema` stays the same, fields may be added, but neither
renamed nor given another meaning.  `docs/status-schema.md` is generated from this file.  Unknown is null, never 0.
"""

import enum
from collections.abc import Sequence

import msgspec

from melld.migrate.snapshot import Phase
from melld.scheduler.priorities import Tier
from melld.scheduler.roles import Role

SCHEMA = 1


class DaemonState(enum.StrEnum):
    """State of the daemon."""

    STARTING = "starting"  # no worker has produced a token yet
    READY = "ready"  # takes requests
    DRAINING = "draining"  # takes no new requests
    STOPPING = "stopping"  # its workers are ending


class WorkerState(enum.StrEnum):
    """State of a worker."""

    STARTING = "starting"  # its process loads the model; no token yet
    READY = "ready"  # runs requests
    DRAINING = "draining"  # its requests end or move away; takes no new ones
    ASLEEP = "asleep"  # its process waits, and can serve at once
    DOZING = "dozing"  # its process waits without weights, which it reads again when needed
    STOPPING = "stopping"  # its process is ending
    WAKING = "waking"  # its process starts again; requests placed on it wait
    DRAINED = "drained"  # an operator took its device; `melld resume` starts it
    LENT = "lent"  # another program has its device (`melld run`); it starts when that ends
    WAITING = "waiting"  # another program fills its device; it starts when that has gone
    STOPPED = "stopped"  # no process; started when needed
    FAILED = "failed"  # its process died or would not start; `reason` says what comes next


RESTING = frozenset({WorkerState.ASLEEP, WorkerState.DOZING, WorkerState.STOPPING, WorkerState.STOPPED})
"""The serving states in which a worker is not needed now."""
SERVING = RESTING | {WorkerState.READY, WorkerState.WAKING}
"""States in which a worker runs requests or can be woken for one."""


class LoanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A program that `melld run` lends a worker's device to, and how long it has had it, emptying included."""

    command: str
    pid: int
    """Of `melld run`."""
    user: str
    age_s: float


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and its device."""

    worker: str
    model: str = ""
    device: str
    """`cuda:0`, `cpu:1`; in a cluster `10.0.0.2/cuda:0`."""
    machine: str = ""
    device_name: str | None = None
    state: WorkerState
    role: Role = Role.MIXED
    reason: str = ""
    """Why it is in that state, or why a reading is missing."""
    pid: int | None = None
    capacity_bytes: int | None = 0
    """Size of its KV cache; 0 until it has been ready, null if its model keeps no KV."""
    used_bytes: int = 0
    """KV in use; a block that requests share counts once."""
    total_blocks: int = 0
    used_blocks: int = 0
    """What the prefix cache alone holds is free."""
    reserved_blocks: int = 0
    """For requests on their way here."""
    promised_bytes: int = 0
    """KV kept for a large request that waits."""
    freeness_s: float | None = None
    """How long its free KV lasts as its requests grow."""
    running_requests: int = 0
    waiting_requests: int = 0
    """Requests that it has not begun, or has preempted."""
    max_requests: int = 0
    tokens_per_s: float = 0.0
    """Output tokens, lately."""
    step_ms: float | None = None
    """Median of its latest steps."""
    memory_bytes: int | None = None
    """In use on the device, by any process; of a CPU worker, its resident memory."""
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    utilisation: float | None = None
    """Part of the time in which the device is busy; of a CPU worker, of one core."""
    restarts: int = 0
    size_class: str | None = None
    """Of its largest request: `T` (or tiny), `S`, `M`, `L`."""
    why: str = ""
    """Why it is awake or not, when it will sleep, how far its drain is."""
    loan: LoanStatus | None = None


def workers_ready(workers: Sequence[WorkerStatus]) -> str:
    """Return a text on how many workers serve, including those at rest, which are woken when needed."""
    serving, resting = (sum(worker.state in which for worker in workers) for which in (SERVING, RESTING))
    return f"{serving} of {len(workers)} workers ready" + (f" ({resting} at rest)" if resting else "")


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request: one sequence of a call."""

    request: str
    """The client's id, with a suffix for each sequence."""
    model: str = ""
    worker: str | None = None
    """Null while it is queued."""
    phase: Phase
    tier: Tier = Tier.DEFAULT
    priority: int = 0
    """Lower goes first."""
    prompt_tokens: int
    output_tokens: int = 0
    kv_bytes: int = 0
    """A shared block counts for each request."""
    blocks: int = 0
    age_s: float
    moves: int = 0
    suspensions: int = 0
    """Times that a request was suspended for an urgent one."""
    """Times that it was suspended for an urgent request."""
    pinned: bool = False
    """True if an operator sent it to its worker, where it stays."""
    moving_to: str | None = None
    moving_step: str | None = None
    """`copying` or `freezing`."""


class MovingState(enum.StrEnum):
    """State of a move."""

    RUNNING = "running"  # its KV is copied, or its tokens are recomputed
    DEFERRED = "deferred"  # waits for links or workers


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A move that is not over; its request counts on both workers."""

    request: str
    source: str
    destination: str
    state: MovingState
    via: str | None = None
    """`kv` or `tokens`."""
    kv_bytes: int
    cause: str
    """`overload`, `drain`, `operator`, ..."""
    deferred_because: str = ""
    age_s: float
    """Seconds since the decision."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one worker to another."""

    source: str
    destination: str
    transport: str | None = None
    """`shared_memory`, `cuda_peer`, `cuda_staged`, `nixl`; null if KV cannot be copied."""
    bytes_per_s: float | None = None
    """Rate measured when the link was opened."""
    tokens_only_because: str = ""


class ModelState(enum.StrEnum):
    """State of a model."""

    LOADED = "loaded"  # a worker has it in memory
    LOADING = "loading"  # its first worker starts; requests wait for it
    UNLOADED = "unloaded"  # no worker has it in memory; the next request starts one
    FAILED = "failed"  # it cannot be served; the reason says why


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model."""

    model: str
    """The first of `names`."""
    names: tuple[str, ...]
    """All that clients may call it."""
    state: ModelState
    reason: str = ""
    """Why it cannot be served."""
    capabilities: tuple[str, ...] = ()
    """`completion`, `embedding`, `vision`, `audio`, `tools`, `thinking`, ...; empty until it has been loaded once."""
    answer_formats: str = ""
    """The parsers of its tool calls and reasoning, and what chose them."""


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model on one device."""

    model: str
    worker: str
    state: str
    """`stopped`, `clearing` (memory is made free for it), `loading`, `ready`, `draining`, `leaving`, `dozing`, or
    `failed`."""
    resident_bytes: int = 0
    """Memory for its weights and all else but lent KV memory."""
    granted_bytes: int = 0
    """KV memory that it may use now."""
    used_bytes: int = 0
    """KV memory of its requests."""


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device that several models share."""

    device: str
    memory_bytes: int
    """What it may hold of weights and KV."""
    free_bytes: int = 0
    """What may still be granted."""
    arena_bytes: int | None = None
    """What KV takes now; null where KV memory is not lent."""
    models: tuple[TenantStatus, ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Targets, and the part of the requests that met them; those sent away for want of room met none."""

    itl_target_ms: float | None = None
    ttft_target_s: float = 0.0
    requests: int = 0
    attainment: float | None = None
    """Part that met both."""
    ttft_attainment: float | None = None
    """Of the first token alone."""
    itl_attainment: float | None = None
    """Of the pace alone."""


class MachineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a cluster."""

    machine: str
    workers: tuple[str, ...]
    reason: str = ""
    """Why it is lost."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon."""

    schema: int = SCHEMA
    melld_version: str
    vllm_version: str
    pid: int
    model: str
    """The first of `models`."""
    models: tuple[str, ...] = ()
    """Names of the first model."""
    served: tuple[ModelStatus, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()
    """Empty with one model."""
    machines: tuple[MachineStatus, ...] = ()
    """Empty without a cluster."""
    state: DaemonState
    renewal: str = ""
    uptime_s: float
    """Since its start, where counts and sums begin."""
    url: str
    policy: str
    queued_requests: int = 0
    warnings: tuple[str, ...] = ()
    """A sentence each, for the operator."""
    workers: tuple[WorkerStatus, ...] = ()
    preemptions: int = 0
    suspensions: int = 0
    worker_seconds_awake: float = 0.0
    gpu_hours_saved: float = 0.0
    """While workers slept or were stopped."""
    service: ServiceStatus = ServiceStatus()
    roles: str = ""
    """Why the workers have their roles."""
    boundaries: str = ""
    """What links and workers were seen to do for moves."""
    links: tuple[LinkStatus, ...] = ()
    async_scheduling: str = ""
    """On or off, and why."""
    moves: tuple[MoveStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()
    """Those on workers, then those that wait, each in the order of arrival."""
