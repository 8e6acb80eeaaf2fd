"""What melld uses of vLLM only on a GPU: read from the pinned sources, most of which cannot be imported without one."""

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from melld.engine.worker.forking import IMPORTS, IMPORTS_OF_KIND
from tests.contracts.sources import Fact, installed

V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"
SCHEDULER, CORE = "vllm/v1/core/sched/scheduler.py", "vllm/v1/engine/core.py"
UTILS, WORKER = "vllm/v1/worker/utils.py", "vllm/v1/worker/gpu_worker.py"
SERVER, CONFIG = "vllm/engine/arg_utils.py", "vllm/config/vllm.py"

MEMORY = [
    Fact(
        "all layers lie in one allocation", UTILS, "allocate_kv_cache", "assert len(sizes) == 1, ... buf = torch.zeros("
    ),
    Fact("a tensor's size is the allocation's", UTILS, "allocate_kv_cache", "raw_size = sizes.pop()"),
    Fact(
        "the V1 runner keeps every layer's view",
        UTILS,
        "bind_kv_cache",
        "runner_kv_caches.append(kv_caches[layer_name])",
    ),
    Fact(
        "the V2 runner keeps every layer's view",
        V2,
        "GPUModelRunner.initialize_kv_cache",
        "self.kv_caches = [ cache for",
    ),
    Fact(
        "a layer's own view is its attribute",
        "vllm/model_executor/layers/attention_layer_base.py",
        "AttentionLayerBase.bind_kv_cache",
        "self.kv_cache = kv_cache",
    ),
    Fact(
        "KV comes from torch's own allocator where no sleep mode is asked for",
        WORKER,
        "Worker._maybe_get_memory_pool_context",
        "is_cuda_alike() and not self.vllm_config.model_config.enable_cumem_allocator ): return nullcontext()",
    ),
    Fact(
        "sleep mode asks for the other allocator",
        "vllm/config/model.py",
        "",
        "if self.enable_sleep_mode: ... self.enable_cumem_allocator = True",
    ),
    Fact("fresh blocks need no zeros with full attention alone", SCHEDULER, "", "self.needs_kv_cache_zeroing ="),
]
SLEEP = [
    Fact(
        "level 1 keeps the weights alone", CORE, "EngineCore.sleep", "Level 1: Offload model weights to CPU, discard KV"
    ),
    Fact(
        "an idle engine sleeps at once",
        CORE,
        "EngineCore.sleep",
        "if pause_future is None: model_executor.sleep(level)",
    ),
    Fact("nothing is cached then", CORE, "EngineCore.sleep", "clear_prefix_cache = level >= 1"),
    Fact("waking goes on with requests", CORE, "EngineCore.wake_up", "if fully_awake: self.resume_scheduler()"),
    Fact("the worker frees what it must", WORKER, "Worker.sleep", "self.sleep_mode_backend.suspend(level)"),
]
ASYNC = [
    Fact(
        "a worker's executor can schedule ahead",
        "vllm/v1/executor/uniproc_executor.py",
        "UniProcExecutor.supports_async_scheduling",
        "return True",
    ),
    Fact("vLLM turns it on where nobody says", CONFIG, "", "else: self.scheduler_config.async_scheduling = True"),
    Fact("the CPU turns it off", "vllm/platforms/cpu.py", "", "scheduler_config.async_scheduling = False"),
    Fact("two steps are in flight then", CONFIG, "VllmConfig.max_concurrent_batches", "if pp_size <= 1: return 2"),
    Fact(
        "its scheduler is vLLM's own with more",
        "vllm/v1/core/sched/async_scheduler.py",
        "AsyncScheduler",
        "class AsyncScheduler(Scheduler):",
    ),
    Fact(
        "the batch queue has the steps in flight",
        CORE,
        "EngineCore.step_with_batch_queue",
        "batch_queue.appendleft((future, scheduler_output,",
    ),
    Fact(
        "a step counts its tokens as in flight",
        SCHEDULER,
        "Scheduler._update_after_schedule",
        "request.num_in_flight_tokens += num_scheduled_token",
    ),
    Fact(
        "its output ends that",
        SCHEDULER,
        "Scheduler.update_from_output",
        "request.num_in_flight_tokens -= num_tokens_scheduled",
    ),
    Fact(
        "blocks of steps in flight are freed late if asked",
        SCHEDULER,
        "Scheduler.update_from_output",
        "if self.defer_block_free and ... self._drain_deferred_frees()",
    ),
    Fact(
        "only a KV connector would ask by itself",
        SCHEDULER,
        "Scheduler.__init__",
        "self.defer_block_free = False ... is_kv_consumer: self.defer_block_free = True",
    ),
    Fact(
        "the V1 runner takes a resumed request's tokens from the scheduler",
        V1,
        "GPUModelRunner._update_states",
        "if self.use_async_scheduling and num_output_tokens > 0: ... resumed_token_ids = req_data.all_token_ids[",
    ),
    Fact(
        "a paused scheduler gives a step nothing to do",
        SCHEDULER,
        "Scheduler.schedule",
        "if self._pause_state == PauseState.PAUSED_ALL: ... token_budget = 0",
    ),
    Fact(
        "and then counts no request, so that a step in flight is ended and none begun",
        SCHEDULER,
        "Scheduler.get_num_unfinished_requests",
        "if self._pause_state == PauseState.PAUSED_ALL: return 0",
    ),
    Fact(
        "the V1 runner knows what it has sampled where a logits processor needs it",
        "vllm/v1/worker/gpu_input_batch.py",
        "InputBatch._make_sampling_metadata",
        "or self.logitsprocs_need_output_token_ids",
    ),
    Fact(
        "else tokens of a list are lost once that is needed: `residency.runner.know_all_outputs`",
        "vllm/v1/worker/gpu_input_batch.py",
        "InputBatch.update_async_output_token_ids",
        "req_output_token_ids[first_placeholder:] = new_ids",
    ),
    Fact(
        "who was not in the last step is sent whole",
        SCHEDULER,
        "",
        "if req_id not in self.prev_step_scheduled_req_ids:",
    ),
]
RUNNERS = [
    Fact("the V2 runner needs Triton", CONFIG, "VllmConfig.use_v2_model_runner", "if not HAS_TRITON: ... return False"),
    Fact("the scheduler knows which runner it is", SCHEDULER, "Scheduler.__init__", "self.use_v2_model_runner ="),
    Fact(
        "a slot is freed when its request is told as preempted",
        V2,
        "GPUModelRunner.finish_requests",
        "preempted_req_ids = scheduler_output.preempted_req_ids ... self._remove_request(req_id)",
    ),
    Fact(
        "who is told as preempted is the scheduler's set",
        SCHEDULER,
        "",
        "preempted_req_ids=self.reset_preempted_req_ids",
    ),
    Fact(
        "a request that comes is made of its tokens alone",
        V2,
        "GPUModelRunner.add_requests",
        "all_token_ids=new_req_data.prefill_token_ids, num_computed_tokens=new_req_data.num_computed_tokens",
    ),
    Fact(
        "its blocks are replaced",
        V2,
        "GPUModelRunner.add_requests",
        "self.block_tables.append_block_ids( req_index, new_req_data.block_ids, overwrite=True",
    ),
    Fact(
        "a draw of the V2 sampler is of seed and place",
        "vllm/v1/worker/gpu/sample/gumbel.py",
        "",
        "u = murmur3_uniform32(seed, pos, keys)",
    ),
    Fact(
        "the place is the token's in its request",
        "vllm/v1/worker/gpu/sample/sampler.py",
        "",
        "pos = input_batch.positions[input_batch.logits_indices]",
    ),
    Fact("a CUDA draw of the V1 runner is four steps of the offset", V1, "", "gen.set_offset(gen.get_offset() - 4)"),
    Fact(
        "the V1 runner has multimodal positions made by",
        V1,
        "GPUModelRunner._init_mrope_positions",
        "def _init_mrope_positions(self, req_state",
    ),
]
PROCESS = [
    Fact(
        "a worker's device is the first that it sees",
        "vllm/v1/executor/uniproc_executor.py",
        "UniProcExecutor._distributed_args",
        "local_rank = int(device_info[1]) if len(device_info) > 1 else 0",
    ),
    Fact(
        "as many tokens a step as `vllm serve` on an H100",
        SERVER,
        "EngineArgs.get_batch_defaults",
        "device_memory >= 70 * GiB_bytes ... UsageContext.OPENAI_API_SERVER: 8192",
    ),
    Fact(
        "as many requests",
        SERVER,
        "EngineArgs.get_batch_defaults",
        "device_memory >= 70 * GiB_bytes ... UsageContext.OPENAI_API_SERVER: 1024",
    ),
    *(
        Fact(f"loading goes through {name}", "vllm/v1/executor/abstract.py", f"Executor.{name}", f"def {name}(self")
        for name in ("determine_available_memory", "initialize_from_config")
    ),
    *(
        Fact(f"the environment has {name}", "vllm/envs.py", "", f'"{name}": lambda:')
        for name in (*COMMON_ENVIRONMENT, *CPU_ENVIRONMENT, "VLLM_CACHE_ROOT", "VLLM_USE_V2_MODEL_RUNNER")
        if name.startswith("VLLM_")
    ),
]
LENT = [
    Fact("the V1 runner is there for who asks", CONFIG, "VllmConfig.use_v2_model_runner", "return use_v2_model_runner"),
    Fact("its KV comes from the function that is replaced", V1, "GPUModelRunner", "kv_caches = allocate_kv_cache("),
    Fact(
        "it copies its block tables to the device for every step",
        V1,
        "GPUModelRunner._prepare_inputs",
        "self.input_batch.block_table.commit_block_table(num_reqs)",
    ),
    Fact(
        "a row without blocks names the null block alone",
        "vllm/v1/worker/block_table.py",
        "BlockTable.clear_row",
        "self.block_table.np[row_idx, :num_blocks] = 0",
    ),
    Fact(
        "a backend that names no layout reads those with blocks outermost",
        "vllm/v1/attention/backends/utils.py",
        "",
        "_DEFAULT_LAYOUT_PREFERENCE = ( ... KVCacheLayout.BLNHC, KVCacheLayout.BLHNC,",
    ),
    Fact(
        "a configured size of KV is taken without looking for memory",
        WORKER,
        "Worker.determine_available_memory",
        "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes: ... return",
    ),
    Fact(
        "before, the share must be free",
        UTILS,
        "request_memory",
        "if init_snapshot.free_memory < requested_memory: raise ValueError(",
    ),
]
FACTS = [*MEMORY, *LENT, *SLEEP, *ASYNC, *RUNNERS, *PROCESS]


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_vllm_matches_the_cuda_side_s_assumptions(fact: Fact) -> None:
    """An upgrade of vLLM that breaks one fails here, by name, and not on the first GPU."""
    assert fact.holds_in(fact.source())


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_vllm_that_differs_is_noticed(fact: Fact) -> None:
    """Each test above can fail: it does where the words are changed."""
    assert not fact.holds_in(fact.otherwise())


@pytest.mark.parametrize("module", [*IMPORTS, *IMPORTS_OF_KIND["cuda"]])
def test_everything_imported_ahead_exists(module: str) -> None:
    """The template skips a name that has gone; each worker would then import its successor."""
    file = installed(module.replace(".", "/") + ".py") if "." in module else installed(module + "/__init__.py")
    assert file.exists() or (file.with_suffix("") / "__init__.py").exists()
