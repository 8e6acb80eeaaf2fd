"""The daemon's state, as `melld status --json` prints it and the control socket returns it.

Owns only the types, which are a promise to scripts: while `schema` stays the same, fields may be added, but never
renamed or given another meaning.  `docs/status-schema.md` is generated from this file.  Unknown is null, never 0.
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
    READY = "ready"  # accepts requests
    DRAINING = "draining"  # accepts no new requests
    STOPPING = "stopping"  # its workers are exiting


class WorkerState(enum.StrEnum):
    """State of a worker."""

    STARTING = "starting"  # its process is loading the model; no token yet
    READY = "ready"  # runs requests
    DRAINING = "draining"  # its requests finish or move away; accepts no new ones
    ASLEEP = "asleep"  # its process is idle and can serve immediately
    DOZING = "dozing"  # its process is idle without weights, which it reloads when needed
    STOPPING = "stopping"  # its process is exiting
    WAKING = "waking"  # its process is starting again; requests placed on it wait
    DRAINED = "drained"  # an operator took it out of service; `melld resume` starts it
    LENT = "lent"  # its device is lent to another program (`melld run`); it starts when that exits
    WAITING = "waiting"  # another program fills its device, or its machine is lost; it starts once that is resolved
    STOPPED = "stopped"  # no process; started when needed
    FAILED = "failed"  # its process died or failed to start; `reason` says what happens next


RESTING = frozenset({WorkerState.ASLEEP, WorkerState.DOZING, WorkerState.STOPPING, WorkerState.STOPPED})
"""Serving states of a worker that is not needed right now."""
SERVING = RESTING | {WorkerState.READY, WorkerState.WAKING}
"""States of a worker that runs requests or can be woken for one."""


class LoanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The program that `melld run` lent a worker's device to, and for how long, including the time to drain it."""

    command: str
    pid: int
    """PID of `melld run`."""
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
    """Why the worker is in this state, or why a reading is missing."""
    pid: int | None = None
    capacity_bytes: int | None = 0
    """KV cache size; 0 until the worker has been ready, null if its model keeps no KV."""
    used_bytes: int = 0
    """KV in use; a shared block counts once."""
    total_blocks: int = 0
    used_blocks: int = 0
    """Blocks in use; those held only by the prefix cache count as free."""
    reserved_blocks: int = 0
    """Reserved for incoming requests."""
    promised_bytes: int = 0
    """KV reserved for a large request that is waiting."""
    freeness_s: float | None = None
    """How long its free KV will last as its requests grow."""
    running_requests: int = 0
    waiting_requests: int = 0
    """Requests not started yet, or preempted."""
    max_requests: int = 0
    tokens_per_s: float = 0.0
    """Recent rate of output tokens."""
    step_ms: float | None = None
    """Median of recent steps."""
    memory_bytes: int | None = None
    """Memory in use on the device by any process; for a CPU worker, its resident memory."""
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    utilisation: float | None = None
    """Fraction of time the device is busy; for a CPU worker, of one core."""
    restarts: int = 0
    size_class: str | None = None
    """Size class of its largest request: `T` (or tiny), `S`, `M`, `L`."""
    why: str = ""
    """Why it is awake or not, when it will sleep, how far it has drained."""
    loan: LoanStatus | None = None


def workers_ready(workers: Sequence[WorkerStatus]) -> str:
    """Return how many workers serve, as text; resting ones count, as they are woken when needed."""
    serving, resting = (sum(worker.state in which for worker in workers) for which in (SERVING, RESTING))
    return f"{serving} of {len(workers)} workers ready" + (f" ({resting} at rest)" if resting else "")


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request: one sequence of a call."""

    request: str
    """The client's id plus a suffix per sequence."""
    model: str = ""
    worker: str | None = None
    """Null while queued."""
    phase: Phase
    tier: Tier = Tier.DEFAULT
    priority: int = 0
    """Lower goes first."""
    prompt_tokens: int
    output_tokens: int = 0
    kv_bytes: int = 0
    """Shared blocks count for every request."""
    blocks: int = 0
    age_s: float
    moves: int = 0
    suspensions: int = 0
    """How often it was suspended for a more urgent request."""
    pinned: bool = False
    """True if an operator moved it to its worker, where it stays."""
    moving_to: str | None = None
    moving_step: str | None = None
    """`copying` or `freezing`."""


class MovingState(enum.StrEnum):
    """State of a move."""

    RUNNING = "running"  # KV is being copied, or tokens recomputed
    DEFERRED = "deferred"  # waiting for links or workers


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A move in progress; its request counts on both workers."""

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
    """Seconds since it was decided."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The connection from one worker to another."""

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
    LOADING = "loading"  # its first worker is starting; requests wait for it
    UNLOADED = "unloaded"  # no worker has it in memory; the next request starts one
    FAILED = "failed"  # it cannot be served; `reason` says why


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model."""

    model: str
    """The first of `names`."""
    names: tuple[str, ...]
    """All names that clients may use."""
    state: ModelState
    reason: str = ""
    """Why it cannot be served."""
    capabilities: tuple[str, ...] = ()
    """`completion`, `embedding`, `vision`, `audio`, `tools`, `thinking`, ...; empty until it has been loaded once."""
    answer_formats: str = ""
    """Its tool call and reasoning parsers, and how they were chosen."""


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model on one device."""

    model: str
    worker: str
    state: str
    """`stopped`, `clearing` (memory is being freed for it), `loading`, `ready`, `draining`, `leaving`, `dozing`, or
    `failed`."""
    resident_bytes: int = 0
    """Memory for its weights and everything else except lent KV memory."""
    granted_bytes: int = 0
    """KV memory it may currently use."""
    used_bytes: int = 0
    """KV memory its requests use."""


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device that several models share."""

    device: str
    memory_bytes: int
    """Limit for weights and KV."""
    free_bytes: int = 0
    """Memory that can still be granted."""
    arena_bytes: int | None = None
    """Memory that KV takes now; null if KV memory is not lent."""
    models: tuple[TenantStatus, ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Targets, and the fraction of requests that met them; requests rejected for lack of capacity count as misses."""

    itl_target_ms: float | None = None
    ttft_target_s: float = 0.0
    requests: int = 0
    attainment: float | None = None
    """Fraction that met both targets."""
    ttft_attainment: float | None = None
    """Fraction that met the time to first token."""
    itl_attainment: float | None = None
    """Fraction that met the time between tokens."""


class MachineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a cluster."""

    machine: str
    workers: tuple[str, ...]
    reason: str = ""
    """Why the machine is lost."""


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
    """Time since startup; counters and sums start from there."""
    url: str
    policy: str
    queued_requests: int = 0
    warnings: tuple[str, ...] = ()
    """One sentence each, for the operator."""
    workers: tuple[WorkerStatus, ...] = ()
    preemptions: int = 0
    suspensions: int = 0
    worker_seconds_awake: float = 0.0
    gpu_hours_saved: float = 0.0
    """GPU hours during which workers slept or were stopped."""
    service: ServiceStatus = ServiceStatus()
    roles: str = ""
    """Why the workers have their roles."""
    boundaries: str = ""
    """Measured limits of links and workers for moves."""
    links: tuple[LinkStatus, ...] = ()
    async_scheduling: str = ""
    """On or off, and why."""
    moves: tuple[MoveStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()
    """Requests on workers, then queued ones, each in order of arrival."""
