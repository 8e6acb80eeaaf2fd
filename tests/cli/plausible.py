"""A plausible daemon status: three GPUs, one of them asleep and one with a story to tell."""

from melld.control.status import (
    DaemonState,
    DaemonStatus,
    LinkStatus,
    MoveStatus,
    MovingState,
    RequestStatus,
    ServiceStatus,
    WorkerState,
    WorkerStatus,
)
from melld.migrate.snapshot import Phase

GIB = 1 << 30
BLOCK_BYTES = 2 << 20

H200 = {"device_name": "NVIDIA H200", "memory_total_bytes": 141 * GIB}


def worker(name: str, device: str, state: WorkerState, used_blocks: int = 0, **facts: object) -> WorkerStatus:
    """A worker with 96 GiB of KV blocks of 2 MiB."""
    total_blocks = 96 * GIB // BLOCK_BYTES
    known = {
        "capacity_bytes": total_blocks * BLOCK_BYTES,
        "used_bytes": used_blocks * BLOCK_BYTES,
        "total_blocks": total_blocks,
        "used_blocks": used_blocks,
        "max_requests": 256,
    }
    return WorkerStatus(worker=name, device=device, state=state, **{**H200, **known, **facts})


BUSY = worker(
    "w0",
    "cuda:0",
    WorkerState.READY,
    used_blocks=35_000,
    reserved_blocks=2_400,
    pid=4242,
    running_requests=48,
    waiting_requests=3,
    tokens_per_s=1843.4,
    step_ms=24.6,
    memory_bytes=127 * GIB,
    power_w=612.4,
    temperature_c=64,
    utilisation=0.97,
    size_class="L",
    why="51 requests; awake for 840 s (arrival)",
)
ASLEEP = worker(
    "w1",
    "cuda:1",
    WorkerState.ASLEEP,
    pid=4243,
    memory_bytes=3 * GIB,
    power_w=76.2,
    temperature_c=31,
    why="not needed for 12 s (empty)",
)
FAILED = worker(
    "w2",
    "cuda:2",
    WorkerState.FAILED,
    reason="its GPU has fallen off the bus; tried again in 40 s",
    restarts=2,
)

RUNNING = RequestStatus(
    request="chatcmpl-8f3b2c9d41aa4f6b9d7e0c55e1f0a7b2",
    worker="w0",
    phase=Phase.DECODING,
    prompt_tokens=1536,
    output_tokens=412,
    kv_bytes=61 * BLOCK_BYTES,
    blocks=61,
    age_s=17.25,
    moves=1,
)
PREFILLING = RequestStatus(
    request="cmpl-0d51b8a0b8f44a0e9d2f7f7e3a1c9e10-0",
    worker="w0",
    phase=Phase.PREFILLING,
    prompt_tokens=32_768,
    kv_bytes=512 * BLOCK_BYTES,
    blocks=512,
    age_s=0.84,
)
QUEUED = RequestStatus(
    request="chatcmpl-5b0e6a0e7c1d4d6c8f59a2b3c4d5e6f7", phase=Phase.WAITING, prompt_tokens=64, age_s=3.0
)

MOVING = MoveStatus(
    request=RUNNING.request,
    source="w0",
    destination="w1",
    state=MovingState.RUNNING,
    via="kv",
    kv_bytes=RUNNING.kv_bytes,
    cause="overload",
    age_s=0.05,
)
DEFERRED = MoveStatus(
    request=PREFILLING.request,
    source="w0",
    destination="w1",
    state=MovingState.DEFERRED,
    kv_bytes=PREFILLING.kv_bytes,
    cause="overload",
    deferred_because="the link is full",
    age_s=0.2,
)

OPEN = LinkStatus(source="w0", destination="w1", transport="cuda_peer", bytes_per_s=2.1e11)
TOKENS_ONLY = LinkStatus(
    source="w1",
    destination="w0",
    tokens_only_because="cuda_peer: device 0 has no peer access to device 1; cuda_staged: the bytes are not the peer's",
)

STATUS = DaemonStatus(
    melld_version="0.1.0",
    vllm_version="0.32.0",
    pid=4200,
    model="llama-3.1-8b",
    models=("llama-3.1-8b",),
    state=DaemonState.READY,
    uptime_s=4321.5,
    url="http://127.0.0.1:8000",
    policy="best-fit",
    queued_requests=1,
    warnings=("SIGHUP: melld.toml was refused and the old configuration kept: [server.port] Expected `int`",),
    workers=(BUSY, ASLEEP, FAILED),
    preemptions=2,
    worker_seconds_awake=5400.0,
    gpu_hours_saved=0.5,
    service=ServiceStatus(
        itl_target_ms=50.0,
        ttft_target_s=2.0,
        requests=1234,
        attainment=0.9903,
        ttft_attainment=0.9943,
        itl_attainment=0.9951,
    ),
    links=(OPEN, TOKENS_ONLY),
    async_scheduling="off (set in [model.vllm])",
    moves=(MOVING, DEFERRED),
    requests=(RUNNING, PREFILLING, QUEUED),
)
