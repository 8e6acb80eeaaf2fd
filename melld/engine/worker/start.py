"""The start of a worker: build its engine, and prove that it works.

Owns what happens once.  Runs on the worker's main thread, before its loop.
"""

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.layers import kept_by, specs_in
from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.geometry import WITHOUT_KV, KvGeometry
from melld.kvstore.kept import moves_text

if TYPE_CHECKING:
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from melld.engine.worker.links import Shared
    from melld.engine.worker.residency.arena import ArenaMemory

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where `shm_open` makes its files


def open_no_ports() -> None:
    """Make torch create single-member gloo groups without sockets, here and in forks.

    gloo opens a listening socket for every group, on whatever address the machine's name leads to: 13 for one engine,
    open to the network where that name does.  Nobody ever connects to a group of one member, whose collectives are
    copies in its own memory: torch's group without communication (`fake`) does just these.  Groups of several ranks
    (`ranks`) listen, on the loopback interface alone.
    """
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # makes the backend known

    torch.distributed.init_process_group = _without_gloo(torch.distributed.init_process_group)
    torch.distributed.new_group = _without_gloo(torch.distributed.new_group)


def _without_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_without_gloo(*arguments: Any, **options: Any) -> Any:
        backend = options.get("backend")
        members = options.get("ranks", arguments[0] if arguments else None)
        alone = len(members) == 1 if isinstance(members, list) else options.get("world_size", 1) == 1
        if isinstance(backend, str) and "gloo" in backend and alone:
            options["backend"] = backend.replace("gloo", "fake")
        return make(*arguments, **options)

    return make_without_gloo


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)


def vital(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap the work of a vital thread, so that the process ends if the thread fails.

    The daemon reports the last line of the traceback, and starts another worker.
    """

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001  the boundary of the process: without this thread it would hang
            traceback.print_exc()
            os._exit(1)

    return run


def build_engine(
    spec: WorkerSpec,
    tell: Callable[[str], None],
    arena: "ArenaMemory | None",
    among_ranks: "Callable[[type[Executor]], type[Executor]]",
) -> "tuple[EngineCore, bytes]":
    """Build vLLM's engine core in this process, with its executor; return it and its ready response.

    `tell` gets each stage of the progress.  `arena`: where its KV goes, if it can.  `among_ranks` makes an executor
    with several devices.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor

    from melld.engine.arguments import async_engine_args, engine_config
    from melld.engine.worker.residency.memory import hold_kv_in_shared_memory
    from melld.engine.worker.residency.scheduler import schedule_here

    open_no_ports()
    config = engine_config(async_engine_args(spec.model_path, spec.engine_arguments))
    schedule_here(config)
    executor = _telling(Executor.get_class(config), tell)
    if config.device_config.device_type == "cpu":
        from melld.engine.worker.vllm_on_cpu.mends import mend

        mend()
        hold_kv_in_shared_memory()
    if config.parallel_config.world_size > 1:
        executor = among_ranks(executor)
    if arena is not None:
        executor = arena.hold_kv_of(executor)
    tell("loading the model")
    engine = EngineCore(config, executor, log_stats=config.observability_config is not None)
    _remove_rendezvous(engine)
    # vLLM makes this for its own clients; it reads the engine and three attributes that only its process class has.
    engine.engine_index = 0
    engine.frontend_stats_publish_address = None
    response = EngineCoreProc._make_ready_response(engine)  # noqa: SLF001
    return engine, msgspec.msgpack.encode(response)


def _telling(executor: "type[Executor]", tell: Callable[[str], None]) -> "type[Executor]":
    """Return a subclass of the executor that reports each stage of the start."""

    class Telling(executor):  # type: ignore[misc]
        def determine_available_memory(self) -> Any:
            tell("measuring its memory")
            return super().determine_available_memory()

        def initialize_from_config(self, kv_cache_configs: Any) -> None:
            tell("allocating its KV cache")
            super().initialize_from_config(kv_cache_configs)

        def compile_or_warm_up_model(self) -> Any:
            tell("compiling and warming up")
            return super().compile_or_warm_up_model()

    return Telling


def _remove_rendezvous(engine: "EngineCore") -> None:
    """Remove the rendezvous files of an engine's processes, which vLLM leaves behind."""
    for place in set(engine.model_executor.collective_rpc(_rendezvous)):
        if place.startswith("file://"):
            met = Path(place.removeprefix("file://"))
            for file in (met, *SHARED_MEMORY.glob(f"{met.name}-*")):  # what is mapped stays until the processes end
                file.unlink(missing_ok=True)


def _rendezvous(rank: Any) -> str:
    return str(rank.worker.distributed_init_method)


def warm_up(engine: "EngineCore", logprobs: int | None = None) -> "EngineCoreOutput":
    """Produce a real token and return it: only then is the worker ready."""
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

    tasks = engine.get_supported_tasks()
    parameters = (
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=logprobs)
        if wire.generates(tasks)
        else PoolingParams(task=tasks[0])
    )
    add_own_request(engine, "warm-up", [1, 2, 3, 4], parameters)
    last = None
    while engine.scheduler.has_requests() or engine.batch_queue:
        outputs, executed = engine.step_fn()
        engine.post_step(model_executed=executed)
        for output in outputs[0].outputs if outputs and 0 in outputs else ():
            last = output if output.finish_reason is not None else last
    if last is None:
        raise RuntimeError("the engine ran out of work without having produced a token")
    return last


def ready_of(
    engine: "EngineCore", shared: "Shared", response: bytes, load_s: float, arena_failure: str = ""
) -> wire.WorkerReady:
    """Build the message that reports the worker ready."""
    from melld.engine.worker.residency.block_tables import total_blocks_of

    geometry = _geometry_of(engine, shared)
    return wire.WorkerReady(
        total_blocks=total_blocks_of(engine.scheduler),
        geometry=geometry,
        kv_handle=shared.handle,
        kv_failure=shared.failure,
        far_kv_handle=shared.agent.handle if shared.agent is not None else b"",
        far_kv_failure=shared.far_failure,
        arena_failure=arena_failure,
        resident_bytes=resident_bytes(engine),
        max_requests=engine.scheduler.max_num_active_reqs,
        caches_prefixes=geometry.keeps_kv and bool(engine.vllm_config.cache_config.enable_prefix_caching),
        supported_tasks=list(engine.get_supported_tasks()),
        moves=_moves_of(engine, shared),
        load_s=load_s,
        ready_response=response,
    )


def _geometry_of(engine: "EngineCore", shared: "Shared") -> KvGeometry:
    from melld.engine.worker.residency.block_tables import encoder_tokens_of, groups_of, keeps_kv

    scheduler = engine.scheduler
    if not keeps_kv(scheduler):
        return WITHOUT_KV
    block_bytes = shared.memory.layout.block_bytes if shared.memory is not None else block_bytes_of(engine)
    return KvGeometry(int(scheduler.block_size), block_bytes, groups_of(scheduler), encoder_tokens_of(scheduler))


def _moves_of(engine: "EngineCore", shared: "Shared") -> str:
    from melld.engine.worker.residency.rules import leave_refusal

    kept = kept_by(specs_in(engine.scheduler.kv_cache_config.kv_cache_groups))
    refusal = leave_refusal(engine.scheduler)
    return moves_text(
        kept, wire.generates(engine.get_supported_tasks()), shared.failure, refusal.value if refusal else ""
    )


def resident_bytes(engine: "EngineCore") -> int:
    """Return the worker's memory besides KV: the largest of its GPUs, or the sum of its CPU devices."""
    if engine.vllm_config.device_config.device_type != "cpu":
        return int(max(engine.model_executor.collective_rpc(_weights_bytes)))
    of_ranks: list[int] = engine.model_executor.collective_rpc(_process_bytes)
    return sum(of_ranks) + (_process_bytes() if len(of_ranks) > 1 else 0)


def _weights_bytes(rank: Any) -> int:
    return int(rank.worker.model_runner.model_memory_usage)


def _process_bytes(_rank: Any = None) -> int:
    """Return this process's memory besides KV."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    facts = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in rollup)}
    return (facts["Private_Dirty"] - facts["Pss_Shmem"]) * 1024  # KV is shared memory; the template has the rest


def block_bytes_of(engine: "EngineCore") -> int:
    """Return the bytes of one block of all layers; 0 if they keep no KV.

    All layers lie in one allocation, whose size each of vLLM's descriptions names (`KVCacheTensor.size`).
    """
    kv_cache = engine.scheduler.kv_cache_config
    return int(max((tensor.size for tensor in kv_cache.kv_cache_tensors), default=0) // max(kv_cache.num_blocks, 1))


def add_own_request(
    engine: "EngineCore", name: str, token_ids: list[int], parameters: "SamplingParams | PoolingParams"
) -> None:
    """Add a prompt of the worker's own to the engine, to warm up; its outputs go nowhere.

    `parameters` say whether it is for sampling or for pooling; `name` keeps it apart from users' requests.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    samples = isinstance(parameters, SamplingParams)
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=parameters if samples else None,
        pooling_params=None if samples else parameters,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    prepared, _ = engine.preprocess_add_request(request)
    engine.add_request(prepared)
