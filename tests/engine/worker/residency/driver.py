"""Two real vLLM workers for tests, each in its own process and stepped by hand."""

import contextlib
import ctypes
import json
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.engine.worker.residency.async_on_cpu import schedule_asynchronously
from tests.forked import ROOT, ForkedPython
from tests.patience import PATIENCE_S

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TTFT_S = 2.0
BEGIN = """
import json, sys
from multiprocessing.connection import Connection
from tests.engine.worker.residency.driver import worker_main
worker_main(Connection(int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
"""


@dataclass
class Answer:
    """What a client would have received for one request, in order."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    prompt_tokens_reported: int = 0
    finish: str | None = None
    stop: Any = None

    def add(self, output: dict[str, Any]) -> None:
        assert self.finish is None, "an output after the end"
        self.tokens += output["tokens"]
        self.logprobs += output["logprobs"]
        self.prompt_logprobs += output["prompt_logprobs"]
        if output["prompt_tokens"] is not None:
            assert self.prompt_tokens_reported == 0, "prefill statistics told twice"
            self.prompt_tokens_reported = output["prompt_tokens"]
        self.finish, self.stop = output["finish"], output["stop"]


class WorkerFailed(Exception):
    """An exception raised inside the worker's process."""


class WorkerProxy:
    """The parent's end of one worker."""

    def __init__(self, model: str, options: dict[str, Any], start: type[subprocess.Popen[Any]] = ForkedPython) -> None:
        """`start` makes the process; one with a GPU must be made by `subprocess.Popen`."""
        self._pipe, theirs = multiprocessing.connection.Pipe()
        self.process = start(
            [sys.executable, "-c", BEGIN, str(theirs.fileno()), model, json.dumps(options)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            pass_fds=(theirs.fileno(), *(options.get("arena") or {}).get("files", ())),
        )
        theirs.close()
        self._lock = threading.Lock()

    def __call__(self, name: str, *args: Any) -> Any:
        with self._lock:
            self._pipe.send((name, args))
            return self._receive()

    def send(self, name: str, *args: Any) -> None:
        """Send a command without waiting; `receive` waits."""
        self._pipe.send((name, args))

    def _receive(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except EOFError as error:
            raise WorkerFailed(f"the process ended with {self.process.wait(PATIENCE_S)}") from error
        if not good:
            if isinstance(value, Exception):
                raise value
            raise WorkerFailed(value)
        return value

    receive = _receive

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", ()))
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pipe.close()


def worker_main(pipe: multiprocessing.connection.Connection, model: str, options: dict[str, Any]) -> None:
    """The process's main loop: carries out one command at a time."""
    try:
        worker = Worker(model, options)
        pipe.send((True, "ready"))
    except BaseException:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        name, args = pipe.recv()
        if name == "stop":
            os._exit(0)
        try:
            pipe.send((True, getattr(worker, name)(*args)))
        except Exception as error:  # noqa: BLE001
            from melld.errors import MelldError

            pipe.send((False, _portable(error) if isinstance(error, MelldError) else traceback.format_exc()))


def _portable(error: Exception) -> Exception:
    """Convert one of our errors, with its facts, into a form that survives a pipe."""
    carried = Refused(type(error).__name__, str(error))
    carried.reason = getattr(error, "reason", None)
    return carried


class Refused(Exception):
    """One of melld's errors, raised in a worker: args are the type's name and the message."""

    reason: Any = None


class Worker:
    """One engine with its residency and transport, in the process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        from melld.engine.arguments import BY_PRIORITY, inspect_models_here
        from melld.engine.wire.spec import ArenaSpec
        from melld.engine.worker.residency.arena import ArenaMemory
        from melld.engine.worker.residency.memory import hold_kv_in_shared_memory
        from melld.engine.worker.residency.scheduler import schedule_here
        from melld.engine.worker.start import open_no_ports

        open_no_ports()  # as a worker does: gloo's threads would wake a thousand times a second
        options = dict(options)
        if (library := options.pop("libcuda", None)) is not None:
            ctypes.CDLL(library)  # is found by its name from now on
        spec = options.pop("arena", None)
        arena = ArenaMemory(msgspec.convert(spec, ArenaSpec)) if spec else None
        arguments = {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 32 << 20,
            "distributed_executor_backend": "uni",
            "max_logprobs": 20,
            **BY_PRIORITY,
        } | options
        inspect_models_here()
        self.config = EngineArgs(**arguments).create_engine_config()
        if arguments.get("async_scheduling") and self.config.device_config.device_type == "cpu":
            schedule_asynchronously(self.config)
        if self.config.device_config.device_type == "cpu":
            from melld.engine.worker.vllm_on_cpu.mends import mend

            mend()
            hold_kv_in_shared_memory()
        schedule_here(self.config)
        executor = Executor.get_class(self.config)
        self.engine = EngineCore(self.config, arena.hold_kv_of(executor) if arena else executor, log_stats=True)
        self.arena_failure = arena.failure if arena else ""
        arena = None if self.arena_failure else arena
        self.processor = InputProcessor(self.config)

        from melld.engine.worker.links import share_memory
        from melld.engine.worker.residency.block_tables import BlockEpochs, BlockReporter
        from melld.engine.worker.residency.budget import Ages, StepBudget
        from melld.engine.worker.residency.lent_blocks import LentBlocks
        from melld.engine.worker.residency.residency import Residency
        from melld.engine.worker.residency.rules import kv_refusal
        from melld.engine.worker.tenancy import Borrower
        from melld.scheduler.steptimes import StepTimes

        shared = share_memory(self.engine, arena.spec if arena else None)
        assert shared.memory is not None or kv_refusal(self.engine.scheduler), shared.failure
        self.memory: Any = shared.memory
        self.handle_bytes = shared.handle
        epochs = BlockEpochs()
        self.lent = lent = LentBlocks(self.engine, arena, self.memory, epochs) if arena else None
        times = StepTimes()
        self.residency = Residency(self.engine, epochs, times, lent.map.trials if lent else ())
        self.reporter = BlockReporter(self.engine.scheduler, lambda: lent.held if lent else 0)
        self.said: list[Any] = []
        self.borrower = Borrower(lent, self.said.append)
        self.takes = 0
        self.ahead_s = 0.0
        ages = Ages(self.engine.scheduler, 60.0, lambda: time.monotonic() + self.ahead_s)
        self.budget = StepBudget(
            self.engine, times, None, TTFT_S, lambda: len(self.residency.expected), ages, time.time
        )
        self.counts: list[tuple[int, ...]] = []
        self.warmed: list[str] = []
        self.pullers: dict[bytes, Any] = {}
        self.asked: dict[str, bytes] = {}
        self.taken: list[int] = []

    # -- serving ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], params: dict[str, Any], extra: dict[str, Any]) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from melld.engine.frontend.codec import EngineCodec

        params = dict(params)
        if schema := params.pop("json", None):
            params["structured_outputs"] = StructuredOutputsParams(json=schema)
        if regex := params.pop("regex", None):
            params["structured_outputs"] = StructuredOutputsParams(regex=regex)
        request = self.processor.process_inputs(
            request_id,
            {"prompt_token_ids": prompt, **({"cache_salt": extra["cache_salt"]} if "cache_salt" in extra else {})},
            SamplingParams(**params),
            supported_tasks=("generate",),
            arrival_time=extra.get("arrival_time", time.time()),
            priority=extra.get("priority", 0),
        )
        self.asked[request_id] = EngineCodec().encode_request(request)
        prepared, _ = self.engine.preprocess_add_request(request)
        self.engine.add_request(prepared)

    def step(self, count: int = 1) -> list[dict[str, Any]]:
        """Run that many steps (fewer if there is nothing to do); return their outputs."""
        outputs = []
        for _ in range(count):
            self.residency.warm_on()
            is_busy = self.engine.scheduler.has_requests() or bool(self.engine.batch_queue)
            step = self.borrower.go_on(is_busy) or self.engine.step_fn
            if not is_busy:
                break
            result, executed = step()
            self.engine.post_step(model_executed=executed)
            self.counts.append(tuple(self.budget.stepped(0.0)))  # a step of no time teaches nothing
            self.warmed += self.residency.take_warmed(result.get(0) if result else None)
            if not executed:
                time.sleep(0.001)
            if result and 0 in result:
                outputs += [_plain(output) for output in result[0].outputs]
        return outputs

    def plain_line(self) -> list[str]:
        """Return a first-come-first-served queue of one that has waited a minute and one that has just come."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
        from vllm.v1.request import Request

        from melld.engine.worker.residency.budget import Ages

        line, now_s = create_request_queue(SchedulingPolicy.FCFS), 0.0
        scheduler: Any = SimpleNamespace(policy=SchedulingPolicy.FCFS, waiting=line)
        ages = Ages(scheduler, 60.0, lambda: now_s)
        for name, now_s in (("first", 0.0), ("second", 61.0)):  # noqa: B007  `ages` reads the time
            line.add_request(Request(name, [1], SamplingParams(max_tokens=1), None))
            ages.look()
        return [request.request_id for request in line]

    def pass_time(self, seconds: float) -> None:
        """Add this much to the waiting time of those in the queue."""
        self.ahead_s += seconds

    def take_counts(self) -> list[tuple[int, ...]]:
        """Return (decodes, prompt tokens) of each step since the last call."""
        counts, self.counts = self.counts, []
        return counts

    def aim(
        self,
        target_s: float | None,
        base_s: float = 0.0,
        decode_s: float = 0.0,
        token_s: float = 0.0,
        lone_steps: float = 0.0,
    ) -> None:
        """Give steps a target, and teach the budget what they cost."""
        from melld.engine.wire.spec import StepLimit

        self.budget.limit = None if target_s is None else StepLimit(target_s, lone_steps)
        self.budget.times.__init__()  # type: ignore[misc]
        for number in range(96 if target_s else 0):
            decodes, tokens = 1 + number % 5, number % 3 * 60
            self.budget.times.stepped(base_s + decode_s * decodes + token_s * tokens, decodes, tokens)

    def limit_prompts(self, tokens: int) -> None:
        """Change the operator's `long_prefill_token_threshold`."""
        self.budget._own_chunk = tokens

    def abort(self, request_ids: list[str]) -> None:
        self.residency.abort(request_ids)

    def report(self) -> Any:
        return self.reporter.collect()

    def state(self) -> dict[str, Any]:
        scheduler = self.engine.scheduler
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "free_blocks": pool.get_num_free_blocks(),
            "total_blocks": pool.num_gpu_blocks - 1 - (self.lent.held if self.lent else 0),
            "requests": sorted(scheduler.requests),
            "runner_requests": sorted(
                runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index
            ),
            "tables": sorted(
                request
                for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
                for request, blocks in manager.req_to_blocks.items()
                if blocks
            ),
            "waiting": [request.request_id for request in scheduler.waiting],
            "running": [request.request_id for request in scheduler.running],
            "frozen": tuple(self.residency.frozen),
            "expected": tuple(self.residency.expected),
        }

    def forget_report(self) -> None:
        """Make the next report name every request."""
        self.reporter._last.clear()

    def block_table_sizes(self) -> dict[str, int]:
        """Return the blocks of each of the scheduler's requests, as vLLM's own call gives them."""
        scheduler = self.engine.scheduler
        tables = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests}
        return {name: sum(len(group) for group in groups) for name, groups in tables.items()}

    def groups(self) -> tuple[Any, ...]:
        from melld.engine.worker.residency.block_tables import groups_of

        return groups_of(self.engine.scheduler)

    def kinds(self) -> tuple[str, ...]:
        from melld.engine.layers import kept_by, specs_in

        return kept_by(specs_in(self.engine.scheduler.kv_cache_config.kv_cache_groups)).kinds

    def block_bytes(self) -> int:
        return self.memory.layout.block_bytes

    def freeze_in_flight(self, request_id: str, via: str) -> tuple[str, list[dict[str, Any]], str]:
        """Freeze the request during its step; return its state before, that step's output, and its state after.

        The parts of vllm.v1.engine.core.EngineCore.step, with the freeze between them, as async scheduling has it.
        """
        from melld.migrate.snapshot import Via

        scheduler, executor = self.engine.scheduler, self.engine.model_executor
        scheduled = scheduler.schedule()
        future = executor.execute_model(scheduled, non_block=True)
        before = self.residency.freeze(request_id, Via(via))
        grammar = scheduler.get_grammar_bitmask(scheduled)
        result = future.result() or executor.sample_tokens(grammar)
        outputs = scheduler.update_from_output(scheduled, result)
        told = [_plain(output) for output in outputs[0].outputs] if 0 in outputs else []
        return before, told, self.residency.stillness(request_id)

    def push_out(self, request_id: str) -> None:
        """Preempt the request and reuse its blocks, as vLLM does when they run out."""
        scheduler = self.engine.scheduler
        request = scheduler.requests[request_id]
        blocks = {block for group in scheduler.kv_cache_manager.get_block_ids(request_id) for block in group}
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.kv_cache_manager.evict_blocks(blocks)

    def spoil(self) -> None:
        """Fill all free blocks: with NaN where vLLM clears new ones, else with large numbers."""
        import torch

        layout, pool = self.memory.layout, self.engine.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.blocks if not (block.ref_cnt or block.is_null or block.block_hash)]
        spoilt = 0xFF if self.engine.scheduler.needs_kv_cache_zeroing else 0x41
        shape = len(free), layout.chunk_bytes
        for offset in layout.chunk_offsets:
            blocks = self.memory.region.as_strided(
                (layout.num_blocks, layout.chunk_bytes), (layout.block_stride_bytes, 1), offset
            )
            blocks[free] = torch.full(shape, spoilt, dtype=torch.uint8)

    def doze_and_wake(self) -> None:
        """Release the weights and read them again, where a worker does."""
        from melld.engine.worker.residency.weights import weights_of

        weights = weights_of(self.engine)
        if not weights.refusal:
            weights.drop()
            weights.restore()

    def use_up(self) -> None:
        """Take all free blocks, as others do when memory is short."""
        self.taken = self.residency.borrow_scratch(self.engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def give_back(self) -> None:
        """Free those blocks."""
        self.residency.return_scratch(self.taken)

    # -- residency --------------------------------------------------------------------------------------------------

    def facts(self, request_id: str) -> Any:
        return self.residency.facts(request_id)

    def refusal(self, request_id: str, via: str) -> Any:
        from melld.migrate.snapshot import Via

        return self.residency.refusal(request_id, Via(via))

    def freeze(self, request_id: str, via: str) -> Any:
        from melld.migrate.snapshot import Via

        return self.residency.freeze(request_id, Via(via))

    def stillness(self, request_id: str) -> Any:
        return self.residency.stillness(request_id)

    def snapshot(self, request_id: str) -> bytes:
        return msgspec.msgpack.encode(self.residency.snapshot(request_id))

    def thaw(self, request_id: str) -> None:
        self.residency.thaw(request_id)

    def release(self, request_id: str) -> None:
        self.residency.release(request_id)

    def uncache(self, request_id: str) -> None:
        self.residency.uncache(request_id)

    def core_request(self, request_id: str) -> tuple[bytes, list[int]]:
        """Return its original request, as the daemon keeps it, and its tokens so far."""
        return self.asked[request_id], list(self.engine.scheduler.requests[request_id].output_token_ids)

    def warm(self, core_request: bytes, tokens: list[int], tokens_per_s: float = 0.0) -> bool:
        self.warmed.clear()
        return self.residency.warm(core_request, tokens, tokens_per_s)

    def is_warm(self, request_id: str) -> bool:
        return request_id in self.warmed

    def reserve(self, core_request: bytes, tokens: list[int], capacity: int, computed: int = 0) -> Any:
        return self.residency.reserve(self._prepared(core_request, tokens), capacity, computed)

    def _prepared(self, core_request: bytes, tokens: list[int]) -> Any:
        arrival = self.residency.complete(self.residency.prepare(core_request), tokens)
        self.asked[arrival.request_id] = core_request
        return arrival

    def cancel_while_copying(self, request_id: str) -> tuple[int, int]:
        """Cancel a reservation that is being written to; return the free blocks before and after the copy has ended."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        self.residency.copy_began(request_id)
        self.residency.cancel(request_id)
        before = pool.get_num_free_blocks()
        self.residency.copy_ended(request_id)
        return before, pool.get_num_free_blocks()

    def contract(self, name: str) -> None:
        from tests.engine.worker.residency import contract

        getattr(contract, name)(self.engine)

    def grow(self, request_id: str, capacity: int) -> Any:
        return self.residency.grow(request_id, capacity)

    def attach(self, snapshot: bytes, via: str) -> None:
        from melld.migrate.snapshot import RequestSnapshot, Via

        self.residency.attach(msgspec.msgpack.decode(snapshot, type=RequestSnapshot), Via(via))

    def attach_unreserved(self, core_request: bytes, output_token_ids: list[int]) -> None:
        self.residency.attach_unreserved(self._prepared(core_request, output_token_ids))

    def cancel(self, request_id: str) -> None:
        self.residency.cancel(request_id)

    # -- lending ----------------------------------------------------------------------------------------------------

    def why_no_arena(self) -> str:
        return self.arena_failure

    def grant(self, granules: list[int]) -> None:
        from melld.engine.wire.messages import GrantGranules

        self.borrower.grant(GrantGranules(tuple(granules)))

    def take(self, count: int, deadline_s: float) -> int:
        """Ask for granules, which the next steps answer; return the take's number."""
        from melld.engine.wire.messages import TakeGranules

        self.takes += 1
        self.borrower.take(TakeGranules(self.takes, count, deadline_s))
        return self.takes

    def returned(self) -> list[Any]:
        """Return what was given back since the last call."""
        said, self.said[:] = list(self.said), []
        return said

    def use_scratch(self, request_id: str, prompt: list[int]) -> list[int]:
        """Return a request's answer before anything is granted."""
        assert self.lent is not None
        with self.lent.borrowed():
            self.add(request_id, prompt, {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}, {})
            return [token for output in self.step(20) for token in output["tokens"]]

    def writes_to_trials(self, request_id: str, prompt: list[int]) -> bool:
        """Return True if a request before anything is granted computes where links are tried."""
        blocks, size = self.residency.borrow_scratch(8), self.memory.layout.block_bytes
        assert len(blocks) > 1
        tried = self.memory.region[blocks[0] * size : (blocks[-1] + 1) * size].zero_()
        self.use_scratch(request_id, prompt)
        return bool(tried.any())

    def blocks_in_tables(self) -> set[int]:
        """Return every block that a request has."""
        managers = self.engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        return {block.block_id for m in managers for blocks in m.req_to_blocks.values() for block in blocks}

    def usable_blocks(self) -> set[int]:
        """Return the blocks that lie entirely in granted granules, by their addresses alone."""
        assert self.lent is not None
        size, granule = self.lent.map.block_bytes, self.lent.map.granule_bytes
        return {
            block
            for block in range(self.lent.map.blocks)
            if {block * size // granule, ((block + 1) * size - 1) // granule} <= self.lent.granted
        }

    def check_pool(self) -> None:
        """Check that every reference is a table's, or an ended request's with a step in flight, or withholds the block.

        What is withheld is not free.
        """
        scheduler: Any = self.engine.scheduler
        pool, managers = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager.coordinator
        tables = [blocks for m in managers.single_type_managers for blocks in m.req_to_blocks.values()]
        named = [block.block_id for blocks in tables for block in blocks]
        ended = [block.block_id for _, blocks in scheduler.deferred_frees for block in blocks]
        assert self.engine.batch_queue or not ended
        usable = self.usable_blocks()
        counts = {block.block_id: block.ref_cnt for block in pool.blocks[1:]}
        assert counts == {block: (named + ended).count(block) if block in usable else 1 for block in counts}
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert free == {block for block in usable if not counts[block]}
        assert set(named) <= usable

    def die_at(self, point: str) -> None:
        """Kill the process at this step of the next take."""
        import signal

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        assert self.lent is not None
        lent, memory = self.lent, self.lent._lent
        if point == "asked":
            lent.empty = die  # type: ignore[method-assign,assignment]
        elif point == "withheld":
            lent._pool.get_new_blocks = die
        elif point == "half moved":
            move, times = lent._move, iter(range(2))
            lent._move = lambda *given: move(*given) if next(times, None) == 0 else die()  # type: ignore[method-assign]
        elif point == "moved":
            memory.end = die  # type: ignore[method-assign]
        elif point == "half scrubbed":
            end = memory.end
            memory.end = lambda granules: (end(granules[:1]), die())  # type: ignore[method-assign,assignment]
        else:
            assert point == "scrubbed", point
            self.borrower._say = die

    # -- bytes ------------------------------------------------------------------------------------------------------

    def handle(self) -> bytes:
        return self.handle_bytes

    def pull_begin(self, request_id: str, handle: bytes, source: Any, destination: Any, bytes_per_s: float) -> None:
        """Start a paced pull on its own thread, as a worker does, and return."""
        from concurrent.futures import ThreadPoolExecutor

        from melld.migrate.transports import choose
        from melld.migrate.transports.transport import Puller

        opened = choose.open_best(handle, self.memory.region, self.memory.layout, [])
        puller = Puller(opened.link, bytes_per_s=bytes_per_s, piece_bytes=1)
        self.residency.copy_began(request_id)
        self.copying = ThreadPoolExecutor(1).submit(puller.pull, source, destination)

    def pull_runs(self) -> bool:
        return not self.copying.done()

    def pull_end(self, request_id: str) -> Any:
        pulled = self.copying.result()
        self.residency.copy_ended(request_id)
        return pulled

    def pull(self, handle: bytes, source: tuple[int, ...], destination: tuple[int, ...]) -> Any:
        from melld.migrate.transports import choose
        from melld.migrate.transports.transport import Puller

        if handle not in self.pullers:
            scratch = self.residency.borrow_scratch(4)
            opened = choose.open_best(handle, self.memory.region, self.memory.layout, scratch)
            self.residency.return_scratch(scratch)
            self.pullers[handle] = Puller(opened.link, checksum=True)
        return self.pullers[handle].pull(source, destination)


def _plain(output: Any) -> dict[str, Any]:
    logprobs = output.new_logprobs
    prompt = output.new_prompt_logprobs_tensors
    return {
        "id": output.request_id,
        "tokens": list(output.new_token_ids),
        "logprobs": [] if logprobs is None else [row.tolist() for row in logprobs.logprobs],
        "prompt_logprobs": [] if prompt is None else prompt.logprobs.tolist(),
        "prompt_tokens": None if output.prefill_stats is None else output.prefill_stats.num_prompt_tokens,
        "finish": None if output.finish_reason is None else str(output.finish_reason),
        "stop": output.stop_reason,
        "preempted": any(event.type == 3 for event in output.events or ()),
    }
