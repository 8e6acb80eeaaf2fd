"""What `melld status --json` prints and the control socket answers: the state of the daemon, as facts to look at.

Owns the shapes alone, which are a promise to scripts: fields are added, and neither renamed nor given another meaning,
while `schema` stays the same.  `docs/status-schema.md` is written from this file.  Never gathers anything.

A value that is not known is null, never 0.
"""

import enum
from collections.abc import Sequence

import msgspec

from melld.migrate.snapshot import Phase

SCHEMA = 1


class DaemonState(enum.StrEnum):
    """Where the daemon stands."""

    STARTING = "starting"  # no worker has produced a token yet
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what runs, takes nothing new
    STOPPING = "stopping"  # its workers are ending


class WorkerState(enum.StrEnum):
    """Where a worker stands."""

    STARTING = "starting"  # its process loads the model; not a token yet
    READY = "ready"  # runs requests
    DRAINING = "draining"  # finishes or gives away what it runs, takes nothing new
    ASLEEP = "asleep"  # has no requests and is not needed now; its process waits, and answers at once when it is
    STOPPING = "stopping"  # its process is ending, because it is not needed or because an operator wants its device
    WAKING = "waking"  # on its way from stopped to ready; requests that are placed on it wait
    DRAINED = "drained"  # has no process because an operator wants its device; `melld resume` starts it
    STOPPED = "stopped"  # has no process; started when needed, or when asked for
    FAILED = "failed"  # its process died or would not start; the reason says what comes next


SERVING = frozenset(
    {WorkerState.READY, WorkerState.ASLEEP, WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.WAKING}
)
"""States in which a worker runs requests, or is woken for one."""
RESTING = frozenset({WorkerState.ASLEEP, WorkerState.STOPPING, WorkerState.STOPPED})
"""Those of them in which it is not needed now."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its device."""

    worker: str
    """The worker's name."""
    device: str
    """The device that it runs on: `cuda:0`, `cpu:1`."""
    device_name: str | None = None
    """What the device calls itself: `NVIDIA H200`."""
    state: WorkerState
    """Where it stands."""
    reason: str = ""
    """Why it stands there, or why a reading of its device is missing, in words.  Empty when all is as it should be."""
    pid: int | None = None
    """Its process; null where there is none."""
    capacity_bytes: int = 0
    """Bytes of KV cache that its requests may fill together.  0 until it has been ready."""
    used_bytes: int = 0
    """Bytes of the KV blocks in use, each counted once, however many requests share it."""
    total_blocks: int = 0
    """KV blocks that it has."""
    used_blocks: int = 0
    """KV blocks in use.  What only the prefix cache holds counts as free."""
    reserved_blocks: int = 0
    """KV blocks kept for requests that are on their way here."""
    running_requests: int = 0
    """Requests that take part in its steps."""
    waiting_requests: int = 0
    """Requests that it holds and has not begun, or has preempted."""
    max_requests: int = 0
    """The most requests that it runs at once."""
    tokens_per_s: float = 0.0
    """Output tokens a second, over the last few seconds."""
    step_ms: float | None = None
    """The median duration of its latest steps, in milliseconds; null while it has made none."""
    memory_bytes: int | None = None
    """Memory of the device in use, by whomever; on a CPU device, the resident memory of the worker's process."""
    memory_total_bytes: int | None = None
    """Memory that the device has."""
    power_w: float | None = None
    """Watts that the device draws."""
    temperature_c: int | None = None
    """The device's temperature in degrees Celsius."""
    utilisation: float | None = None
    """Part of the last period in which the device had work, 0 to 1; on a CPU device, of one core."""
    restarts: int = 0
    """How often its process has been started again since the daemon started."""
    size_class: str | None = None
    """Its largest request against its capacity: `T` up to a quarter, `S` a third, `M` a half, `L` more; or null."""
    why: str = ""
    """Why it is awake, or is not: its requests and what it was woken for, when it sleeps, how far its drain is."""


def workers_ready(workers: Sequence[WorkerStatus]) -> str:
    """How many serve, in words: those at rest are among them, they are woken when they are needed."""
    serving = [worker.state for worker in workers if worker.state in SERVING]
    resting = sum(state in RESTING for state in serving)
    return f"{len(serving)} of {len(workers)} workers ready" + (f" ({resting} at rest)" if resting else "")


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request: one sequence that is prefilled, decoded, or waits for its turn."""

    request: str
    """The request's id: the one that the client was told, with an ending that tells it from its siblings."""
    worker: str | None = None
    """The worker that runs it; null while it is queued for want of room on any."""
    phase: Phase
    """`waiting` holds no computed tokens (queued, or preempted), `prefilling` has part of them, `decoding` all."""
    prompt_tokens: int
    """Tokens of its prompt."""
    output_tokens: int = 0
    """Tokens that it has produced."""
    kv_bytes: int = 0
    """Bytes of the KV blocks that its block table names; blocks shared with others count for each."""
    blocks: int = 0
    """KV blocks that its block table names."""
    age_s: float
    """Seconds since it arrived."""
    moves: int = 0
    """How often it has moved to another worker."""
    pinned: bool = False
    """Whether an operator has sent it where it is, or is going: it stays there until the worker drains or ends."""
    moving_to: str | None = None
    """The worker that it is on its way to; null while it stays."""
    moving_step: str | None = None
    """What is being done for that now: `copying`, `freezing`; null while it stays."""


class MovingState(enum.StrEnum):
    """Where a move stands."""

    RUNNING = "running"  # its KV is copied, or its tokens are computed anew
    DEFERRED = "deferred"  # it waits, within the boundaries of links and workers, for its turn


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One move that the scheduler has decided on and that is not over.  Its request counts on both workers."""

    request: str
    """The request's id."""
    source: str
    """The worker that runs it."""
    destination: str
    """The worker that it goes to."""
    state: MovingState
    """Whether it has begun."""
    via: str | None = None
    """`kv` or `tokens`; null while it has not begun."""
    kv_bytes: int
    """The request's size."""
    cause: str
    """Why the scheduler wants it, in a word or two: `overload`, `drain`, `operator`."""
    deferred_because: str = ""
    """Why it has not begun; empty when it has."""
    age_s: float
    """Seconds since it was decided."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How requests go from one worker to one other, of those that have a process."""

    source: str
    """The worker that they leave."""
    destination: str
    """The worker that they go to."""
    transport: str | None = None
    """How their KV is copied: `shared_memory`, `cuda_peer`, `cuda_staged`; null where it cannot be."""
    bytes_per_s: float | None = None
    """How fast that was when the link was opened, with a few blocks; null where it was not tried."""
    tokens_only_because: str = ""
    """Why they can be moved by their tokens alone; empty where their KV can be copied."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon as it is now."""

    schema: int = SCHEMA
    """The version of this schema.  Fields may be added under the same version."""
    melld_version: str
    """Version of melld."""
    vllm_version: str
    """Version of vLLM."""
    pid: int
    """The daemon's process."""
    model: str
    """The name under which the model is served: the first of `models`."""
    models: tuple[str, ...] = ()
    """All names under which it is served."""
    state: DaemonState
    """Where the daemon stands."""
    uptime_s: float
    """Seconds since the daemon started."""
    url: str
    """Where the API listens: `http://127.0.0.1:8000`."""
    policy: str
    """The scheduling policy that places requests."""
    queued_requests: int = 0
    """Requests that no worker has room for yet."""
    warnings: tuple[str, ...] = ()
    """What an operator should know, each in one sentence."""
    workers: tuple[WorkerStatus, ...] = ()
    """Every worker, in the order of the configuration."""
    preemptions: int = 0
    """How often a worker has pushed a request out for want of blocks, since the daemon started."""
    worker_seconds_awake: float = 0.0
    """Seconds in which workers were awake, summed over the workers, since the daemon started."""
    shadow_worker_seconds_awake: float = 0.0
    """What best fit without migration would have needed for the same requests: an estimate, by a shadow run of it."""
    shadow_preemptions: int = 0
    """How often best fit would have pushed a request out, in that shadow run."""
    gpu_hours_saved: float = 0.0
    """The difference of the two, in hours; negative where best fit would have needed less."""
    boundaries: str = ""
    """How much links and workers may do for moves, in one line; `melld profile --show --json` has the figures."""
    links: tuple[LinkStatus, ...] = ()
    """From each worker to each other one."""
    async_scheduling: str = ""
    """Whether workers schedule a step while the last one is computed, as vLLM does by default, and why not."""
    moves: tuple[MoveStatus, ...] = ()
    """Every move that has been decided on and is not over, in the order of the decisions."""
    requests: tuple[RequestStatus, ...] = ()
    """Every request that has not ended: those on workers first, then the queue in its order."""
