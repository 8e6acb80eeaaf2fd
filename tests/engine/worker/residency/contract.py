"""What `engine/residency` assumes about the pinned vLLM, checked on a live engine inside its worker.

Each function asserts one assumption.  Run by `test_residency_contract`, whose names say what broke.
"""

import dataclasses
import inspect
from typing import Any

# Everything that vLLM keeps in a request, and what becomes of it in a move.  A name that is not here is state that
# nobody has thought about: it must be carried, rebuilt, refused, or found not to matter.
CARRIED = {
    "request_id", "client_index", "priority", "sampling_params", "lora_request", "arrival_time", "events", "max_tokens",
    "prompt_token_ids", "num_prompt_tokens", "_output_token_ids", "_all_token_ids", "output_token_ids", "all_token_ids",
    "num_computed_tokens", "cache_salt", "trace_headers", "session_id", "kv_hints", "num_preemptions", "prefill_stats",
    "skip_reading_prefix_cache", "kv_cache_report_mode", "mm_features",
}  # fmt: skip
REBUILT = {"spec_token_ids", "structured_output_request", "status", "block_hashes", "_block_hasher", "is_prefill_chunk"}
REFUSED = {
    "pooling_params", "prompt_embeds", "prompt_is_token_ids", "_prompt_embeds_per_block_hashes",
    "kv_transfer_params", "ec_transfer_params", "resumable", "streaming_queue", "spec_decode_metrics",
    "shared_prefix_boundary", "replay_start", "abort_immediately",
}  # fmt: skip
SETTLED = {
    "num_output_placeholders", "num_stale_output_tokens", "drop_stale_output", "num_in_flight_tokens", "last_sched_seq",
    "next_decode_eligible_step", "stop_reason", "num_nans_in_logits",
}  # fmt: skip


def _vllm_scheduler() -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def a_request_has_no_state_that_we_do_not_know(engine: Any) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None)
    assert set(vars(request)) == CARRIED | REBUILT | REFUSED | SETTLED


def the_v1_runner_keeps_no_state_that_we_do_not_make(engine: Any) -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    made = {
        "req_id", "prompt_token_ids", "mm_features", "sampling_params", "generator", "block_ids", "num_computed_tokens",
        "output_token_ids", "mrope_positions", "mrope_position_delta", "lora_request", "prev_num_draft_len",
    }  # fmt: skip
    refused = {
        "prompt_embeds", "in_progress_prompt_logprobs_cpu", "prompt_is_token_ids",
        "pooling_params", "pooling_states",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(CachedRequestState)} == made | refused


def prefill_statistics_are_counts_from_nothing_on(engine: Any) -> None:
    from vllm.v1.metrics.stats import PrefillStats

    assert set(dataclasses.astuple(PrefillStats())) == {0}


def the_scheduler_has_the_queues_that_we_take_from(engine: Any) -> None:
    scheduler = engine.scheduler
    kinds = {"requests": dict, "running": list, "deferred_waiting": set, "finished_req_ids": set}
    kinds |= {"reset_preempted_req_ids": set, "prev_step_scheduled_req_ids": set, "_inflight_prefills": set}
    for name, kind in kinds.items():
        assert isinstance(getattr(scheduler, name), kind), name
    for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
        assert hasattr(queue, "remove_request")
        assert hasattr(queue, "prepend_request")


def waiting_requests_with_kv_are_scheduled_first(engine: Any) -> None:
    source = inspect.getsource(_vllm_scheduler().schedule)
    assert source.index("request_queue = self.kv_holding_waiting") < source.index("request_queue = self.waiting")
    assert "num_computed_tokens > 0" in inspect.getsource(_vllm_scheduler()._holds_kv_blocks)


def a_drafter_says_how_far_ahead_of_a_part_of_the_prompt_it_reads(engine: Any) -> None:
    from melld.engine.worker.residency.rules import leave_refusal
    from melld.migrate.snapshot import MoveRefusal

    scheduler = engine.scheduler
    assert (scheduler.num_prefill_lookahead, leave_refusal(scheduler)) == (0, None)
    scheduler.num_prefill_lookahead = 2
    assert leave_refusal(scheduler) is MoveRefusal.SPECULATIVE
    scheduler.num_prefill_lookahead = 0


def a_preempted_requests_drafts_are_dropped(engine: Any) -> None:
    source = inspect.getsource(_vllm_scheduler()._preempt_request)
    assert "request.spec_token_ids = []" in source


def an_unknown_requests_output_is_dropped(engine: Any) -> None:
    source = inspect.getsource(_vllm_scheduler().update_from_output)
    assert "if request is None or request.is_finished():" in source


def the_kv_cache_is_plain_full_attention_in_one_allocation(engine: Any) -> None:
    from melld.engine.worker.residency.memory import kv_memory_of
    from melld.engine.worker.residency.rules import kv_refusal

    assert kv_refusal(engine.scheduler) is None
    tensors = kv_memory_of(engine).tensors
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    layers = engine.vllm_config.model_config.get_num_layers(engine.vllm_config.parallel_config)
    assert len({tensor.data_ptr() for tensor in tensors}) == layers


def a_block_that_a_window_has_left_is_the_null_block(engine: Any) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    assert engine.scheduler.kv_cache_manager.block_pool.null_block.block_id == 0
    assert "blocks[i] = self._null_block" in inspect.getsource(SlidingWindowManager._remove_blocks_in_range)
    assert "[self._null_block] * num_skipped_blocks" in inspect.getsource(
        SlidingWindowManager.add_local_computed_blocks
    )


def allocation_can_be_told_not_to_cache_blocks_yet(engine: Any) -> None:
    parameters = inspect.signature(engine.scheduler.kv_cache_manager.allocate_slots).parameters
    expected = {
        "request",
        "num_new_tokens",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "delay_cache_blocks",
        "num_external_computed_tokens",
    }
    assert expected <= set(parameters)


def preprocessing_gives_a_request_and_starts_its_grammar(engine: Any) -> None:
    source = inspect.getsource(engine.preprocess_add_request)
    assert "from_engine_core_request" in source
    assert "grammar_init" in source


def the_cpu_runner_takes_draws_back_by_their_offset(engine: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner)


def the_cpu_sampler_draws_one_integer_a_token(engine: Any) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    source = inspect.getsource(TopKTopPSampler.forward_cpu)
    assert source.count("generator=gen,") == 1
    assert "0, 2**31, (1,), generator=gen" in source


def a_finished_id_reaches_the_runner_with_the_next_step(engine: Any) -> None:
    scheduler = engine.scheduler
    scheduler.finished_req_ids.add("gone long ago")
    assert scheduler.has_requests()
    engine.step_fn()
    assert not scheduler.finished_req_ids
    assert not scheduler.has_requests()


def each_kind_of_request_that_cannot_be_carried_is_refused(engine: Any) -> None:
    import torch
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from melld.engine.worker.residency.rules import request_refusal
    from melld.migrate.snapshot import MoveRefusal, Via

    sampling = SamplingParams(max_tokens=1)
    embeddings = Request("r", None, sampling, None, prompt_embeds=torch.zeros(2, 4))
    session = Request("r", [1], sampling, None, resumable=True)
    pooling = Request("r", [1], None, PoolingParams(task="embed"))
    loading = Request("r", [1], sampling, None)
    loading.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    refused = {
        MoveRefusal.PROMPT_EMBEDDINGS: embeddings,
        MoveRefusal.STREAMING_INPUT: session,
        MoveRefusal.POOLING: pooling,
        MoveRefusal.KV_CONNECTOR: loading,
    }
    for via in Via:
        assert {reason: request_refusal(request, via) for reason, request in refused.items()} == {
            reason: reason for reason in refused
        }
        assert request_refusal(Request("r", [1], sampling, None), via) is None


def an_adapter_that_is_not_loaded_is_refused(engine: Any) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from melld.engine.worker.residency.rules import adapter_refusal
    from melld.migrate.snapshot import MoveRefusal

    adapter = LoRARequest("adapter", 1, "/nowhere")
    assert adapter_refusal(engine, Request("r", [1], SamplingParams(max_tokens=1), None)) is None
    request = Request("r", [1], SamplingParams(max_tokens=1), None, lora_request=adapter)
    assert adapter_refusal(engine, request) is MoveRefusal.LORA_ABSENT


def a_step_keeps_to_the_limits_and_the_order_of_the_moment(engine: Any) -> None:
    """Both limits are read in each step, and `running` is the order in which its tokens are spent."""
    from vllm.sampling_params import SamplingParams

    from melld.engine.worker.start import add_own_request

    scheduler, config = engine.scheduler, engine.scheduler.scheduler_config
    steps, scheduler.steps = scheduler.steps, None  # the budget, which sets both
    before = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
    names = ["first", "second"]
    try:
        for number, name in enumerate(names):
            prompt = [1 + (7 * i + number) % 900 for i in range(900)]
            add_own_request(engine, name, prompt, SamplingParams(max_tokens=1, temperature=0.0))
        requests = [scheduler.requests[name] for name in names]
        done = [0, 0]

        def computed(step_tokens: int, prompt_tokens: int) -> list[int]:
            scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = step_tokens, prompt_tokens
            engine.step_fn()
            news = [request.num_computed_tokens - old for request, old in zip(requests, done, strict=True)]
            done[:] = [request.num_computed_tokens for request in requests]
            return news

        assert computed(50, 30) == [30, 20]
        assert all(request.is_prefill_chunk for request in requests)
        assert computed(90, 0) == [90, 0]
        scheduler.running.reverse()
        assert computed(90, 64) == [26, 64]
        assert computed(256, 256) == [0, 256]
    finally:
        engine.abort_requests(names)
        engine.step_fn()
        scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = before
        scheduler.steps = steps


def a_running_request_says_whether_its_next_step_is_of_its_prompt(engine: Any) -> None:
    source = inspect.getsource(_vllm_scheduler()._update_after_schedule)
    assert "request.is_prefill_chunk = request.num_computed_tokens < (" in source


def every_step_is_scheduled_by_the_method_that_the_budget_wraps(engine: Any) -> None:
    for step in (type(engine).step, type(engine).step_with_batch_queue):
        assert "self.scheduler.schedule(self._should_throttle_prefills())" in inspect.getsource(step)


def the_waiting_go_by_priority_and_then_by_arrival(engine: Any) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue, create_request_queue
    from vllm.v1.request import Request

    scheduler = engine.scheduler
    assert isinstance(scheduler.waiting, PriorityRequestQueue)
    assert isinstance(scheduler.kv_holding_waiting, PriorityRequestQueue)
    line = create_request_queue(scheduler.policy)
    for priority, arrival_time in ((0, 2.0), (1, 1.0), (0, 1.0), (-1, 3.0)):
        request = Request("r", [1], SamplingParams(max_tokens=1), None, arrival_time=arrival_time, priority=priority)
        line.prepend_request(request)
    assert [(one.priority, one.arrival_time) for one in line] == [(-1, 3.0), (0, 1.0), (0, 2.0), (1, 1.0)]


def an_arrival_time_says_whose_turn_it_is_and_nothing_else(engine: Any) -> None:
    from vllm.v1.engine import core

    source = inspect.getsource(_vllm_scheduler())
    uses = [line.strip() for line in source.splitlines() if "arrival_time" in line]
    assert uses == ["key=lambda r: (r.priority, r.arrival_time),", "session.arrival_time = update.arrival_time"]
    assert "arrival_time" not in inspect.getsource(core)
    assert "self._enqueue_waiting_request(request)" in inspect.getsource(_vllm_scheduler().add_request)


def nobody_is_pushed_out_for_one_that_waits(engine: Any) -> None:
    source = inspect.getsource(_vllm_scheduler().schedule)
    running, _, waiting = source.partition("# Next, schedule the WAITING requests.")
    assert "_preempt_request(" in running
    assert waiting
    assert "_preempt_request(" not in waiting


def vllm_asks_who_holds_blocks_before_it_queues_a_request(engine: Any) -> None:
    assert "if self._holds_kv_blocks(request):" in inspect.getsource(_vllm_scheduler()._enqueue_waiting_request)
    source = inspect.getsource(_vllm_scheduler().schedule)
    assert "if self._holds_kv_blocks(request_to_skip):" in source
    assert source.index("request_queue = self.kv_holding_waiting") < source.index("request_queue = self.waiting")
