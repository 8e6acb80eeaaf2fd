"""Every seam: where melld replaces, extends or copies what is inside vLLM, torch, aiohttp and other packages.

The one list to go through when a pin is raised; `docs/architecture.md` has it as a table.  `tests/contracts/test_seams`
finds a reach into another package that is not here, and says what has changed in what a seam takes hold of
(`tests/contracts/places.json`).
"""

import re
from typing import NamedTuple

# what | how | since which version, of vLLM if no other package is named, it has all that is needed (0.27: or older) |
# what upstream could take
#   how: subclass (asked for), class (put in the place of an object's), replaced, private, state (assigned), copied
#   ours: modules of melld, each with the names by which it reaches in
#   test: fails if that behaves otherwise; FILE::NAME under `tests/`
TABLE = """
the scheduler | subclass | 0.31 | the fix of preemption; a hook before and after a step
  why   steps are budgeted; whoever has blocks waits in a line of its own; a preemption names no block not computed
  ours  engine.worker.residency.scheduler: StepByStep OneAhead scheduler_cls _enqueue_waiting_request _preempt_request
        _holds_kv_blocks defer_block_free
  test  engine/worker/residency/contract.py::every_step_is_scheduled_by_the_method_that_the_budget_wraps

limits and order of a step | state | 0.31 | limits as arguments of schedule
  why   decodes go first, prompts get what the target leaves
  ours  engine.worker.residency.budget: arrival_time priority long_prefill_token_threshold max_num_scheduled_tokens
  test  engine/worker/residency/contract.py::a_step_keeps_to_the_limits_and_the_order_of_the_moment

queues and running requests | private | 0.27 | export and import of a running request
  why   a request leaves one engine between two steps, and enters another
  ours  engine.worker.residency.arrival: _enqueue_waiting_request _holds_kv_blocks _grammar events num_computed_tokens
        num_preemptions prefill_stats priority prompt_logprobs sampling_params skip_reading_prefix_cache status;
        engine.worker.residency.departure: _enqueue_waiting_request _free_request_blocks _inflight_prefills
        _is_blocked_waiting_status num_computed_tokens num_preemptions spec_token_ids status;
        engine.worker.residency.lent_blocks: _preempt_request
  test  engine/worker/residency/contract.py::a_request_has_no_state_that_we_do_not_know

tables of blocks and states | private | 0.27 | a reservation without a request
  why   a reservation is a table that no request has yet
  ours  engine.worker.residency.states: _allocated_block_reqs _checkpoints _null_block _num_retired_blocks;
        engine.worker.residency.arriving_tables: new_block_ids req_to_blocks; engine.worker.residency.block_tables:
        req_to_blocks
  test  engine/worker/residency/contract.py::allocation_can_be_told_not_to_cache_blocks_yet

what the first runner keeps of a request | copied | 0.27 | export and import of a running request
  why   the destination makes it anew, its random numbers included
  ours  engine.worker.residency.runner: _init_mrope_positions generator skip_draws _state_of
  test  engine/worker/residency/contract.py::the_v1_runner_keeps_no_state_that_we_do_not_make

draws of a CPU generator | replaced | 0.27 | yes
  why   a fix: CPU generators take no draw back, and the engine crashed
  ours  engine.worker.residency.runner: RewindableGenerator _update_states
  test  engine/worker/residency/test_contract.py::test_cpu_generators_cannot_undo_a_draw

states of requests that come back | replaced | 0.27 | yes
  why   a fix: their state was sought where it once was
  ours  engine.worker.residency.runner: _update_states mamba_state_idx
  test  engine/worker/residency/test_states.py::test_repeated_moves_leave_no_trace

outputs known late | state | 0.27 | yes
  why   a fix: with penalties beside it, min_tokens held longer
  ours  engine.worker.residency.runner: logitsprocs_need_output_token_ids
  test  contracts/test_vllm_cuda.py::test_vllm_matches_the_cuda_side_s_assumptions

budgets of thoughts | replaced | 0.27 | yes
  why   a fix: a request was made to end a thought that another had begun
  ours  engine.worker.residency.runner: sync_batch _state
  test  engine/worker/residency/test_budgets.py::test_vllm_still_needs_the_fix

memory of the KV cache | replaced | 0.29 | an allocator as an argument
  why   siblings map it, and devices lend parts of it
  ours  engine.worker.residency.memory: allocate_kv_cache; engine.worker.residency.arena: allocate_kv_cache
  test  contracts/test_vllm_cuda.py::test_vllm_matches_the_cuda_side_s_assumptions

the executor | subclass | 0.29 | no
  why   it tells how far a start is, lends KV memory, and ends with its ranks
  ours  engine.worker.start: Telling; engine.worker.residency.arena: InArena; engine.worker.ranks: Watched
        _init_executor
  test  migrate/test_tensor_parallel.py::test_a_rank_s_death_is_its_worker_s_and_its_requests_go_on

pauses of ranks that wait | replaced | 0.27 | yes
  why   on CPUs they would take the cores that others compute with
  ours  engine.worker.ranks: sched_yield
  test  migrate/test_tensor_parallel.py::test_idle_ranks_yield_their_cores

groups of one process | replaced | torch 2.13 | yes, to torch: a group that needs no store
  why   gloo would open thirteen ports for an engine, some to the network
  ours  engine.worker.start: init_process_group new_group
  test  api/test_ports.py::test_the_api_s_port_is_the_only_one

what a worker tells as it starts | private | 0.27 | no
  why   the front end's configuration follows the workers'
  ours  engine.worker.start: _make_ready_response engine_index frontend_stats_publish_address;
        engine.frontend.prepared: block_size effective_attention_block_size kv_cache_max_concurrency
        kv_cache_size_tokens mamba_block_size max_model_len num_gpu_blocks
  test  engine/test_arguments.py::test_a_worker_has_the_defaults_of_vllm_serve

weights of a worker that dozes | private | 0.27 | a sleep in pieces
  why   on GPUs in pieces, so that it can be called back; on CPUs read again
  ours  engine.worker.residency.weights: pointer_to_data WEIGHTS_TAG cpu_linear
  test  engine/worker/test_pieces.py::test_an_engine_that_is_wanted_again_stops_after_a_piece

private parts of torch | private | torch 2.13 | no
  why   GPU memory of another process as a storage; a fork before CUDA
  ours  engine.worker.residency.arena: _C _construct_storage_from_data_pointer; engine.worker.forking:
        _is_in_bad_fork
  test  contracts/test_torch_cuda.py::test_torch_matches_the_cuda_side_s_assumptions

grammars | replaced | 0.27 | yes
  why   a compilation can be dropped, and is of the compiler that the judge chose
  ours  engine.worker.grammars: grammar_init backend grammar _backend _CLASSES; engine.worker.judge: _backend
        _validate_structured_outputs
  test  engine/worker/test_grammars.py::test_an_aborted_request_s_grammar_is_not_compiled

a start that costs little | replaced | 0.31 | yes
  why   kernels are put in place once, in the template; no process a model
  ours  engine.worker.forking: register_triton_kernel_overrides; engine.arguments: _run_in_subprocess
  test  engine/test_arguments.py::test_inspecting_a_new_model_starts_no_process

what the CPU build computes wrongly | replaced | 0.32 | yes
  why   fixes of rotations, Mamba and gated delta nets
  ours  engine.worker.vllm_on_cpu.mends: WithRowsInOrder WithoutCheckpoints _custom_ops cpu_gdn_attention_core
        forward_cpu selective_scan_fwd selective_state_update; engine.worker.vllm_on_cpu.gated_delta_net:
        _conv_buffer_view _resolve_layer_name _unpacked_conv_weight
  test  engine/worker/test_vllm_on_cpu.py::test_the_kernel_still_rotates_heads_by_wrong_positions

options and defaults | copied | 0.29 | no
  why   a configuration is checked without importing vLLM; images travel whole
  ours  engine.vllm_options: ENGINE_SOURCE FRONTEND_SOURCE; engine.arguments: IMAGES_TRAVEL_WHOLE LORA_RANKS;
        engine.frontend.prepared: served_model_name lora_modules enable_flash_late_interaction no_tools_because
        structured_outputs_config
  test  engine/test_arguments.py::test_every_option_of_vllm_is_carried_out_or_refused

kinds of KV | copied | 0.27 | no
  why   by their names melld knows what can be moved
  ours  engine.layers: name_of
  test  docs/test_models_text.py::test_every_name_in_vllm_s_registry_is_listed

packages beside vLLM | private | transformers 5.19 | no
  why   torchvision without its library; a model without the hub; templates
  ours  engine.image_library: _has_ops; engine.hub: HF_HUB_OFFLINE; engine.frontend.rehearsal: _compile_jinja_template
  test  engine/test_image_library.py::test_torchvision_still_does_not_load_by_itself

the engine behind the front end | subclass | 0.27 | a client as an argument
  why   a fleet is one engine to it
  ours  engine.frontend.frontend: Frontend _add_request _run_output_handler log_stats; engine.frontend.fleet_client:
        FleetClient Nobody make_async_mp_client arrival_time engine_index
  test  engine/frontend/test_fleet_client.py::test_a_clock_that_is_set_back_reorders_nothing

outputs on their way to text | replaced | 0.27 | the short way
  why   most say no more than which tokens are next: they take a short way
  ours  engine.frontend.frontend: request_states process_outputs take_plain take_step; engine.frontend.plain_outputs:
        _stream_state finished last_token_ts num_generation_tokens outputs plain text token_ids;
        engine.frontend.outlet: _last_output_text_offset plain make_request_output output_text parse_delta text
        token_ids;
        engine.frontend.fleet_client: outputs; engine.frontend.masks: outputs; engine.fleet.fleet: outputs;
        engine.fleet.reports: outputs; engine.fleet.step_outputs: new_token_ids; engine.worker.report: outputs;
        engine.worker.residency.warm: outputs; engine.frontend.tokens.many: ManyTokens __class__
  test  api/test_plain_streams.py::test_a_stamped_stream_equals_vllm_s

log-probabilities | replaced | 0.27 | yes
  why   numbers in place of objects, texts from a table, long prompts in pieces
  ours  engine.frontend.frontend: create_sample_logprobs convert_ids_list_to_tokens; engine.frontend.prompt_logprobs:
        _update_prompt_logprobs new_prompt_logprobs_tensors outputs
  test  engine/frontend/test_prompt_logprobs.py::test_the_pieces_equal_the_whole

copies of tokenizers | replaced | 0.31 | yes
  why   complete copies hold the interpreter for a second with a large vocabulary; caches keep what a model has left
  ours  engine.frontend.tokens.copies: __copy__ __deepcopy__ __dict__ _supports_kw _tokenizer decoder
        encode_special_tokens get_cached_tokenizer normalizer post_processor pre_tokenizer
  test  engine/frontend/tokens/test_copies.py::test_copies_hold_one_table

validation of constraints | replaced | 0.27 | validation off the loop
  why   a judge compiles them, never the event loop
  ours  engine.frontend.frontend: validate_xgrammar_grammar structured_outputs structured_outputs_config
  test  api/test_constraints.py::test_a_schema_is_judged_in_every_form

metrics | private | 0.27 | no
  why   latencies of a step at once; several models in one registry; plugins' loggers are made on the loop, once
  ours  engine.frontend.frontend: load_stat_logger_plugin_factories; engine.frontend.step_logger: Bisected StepLogger
        _buckets _sum _upper_bounds inter_token_latencies_iter;
        engine.frontend.vllm_metrics: _collector_to_names _model_name _tool_call_parser_invocations init_parser_metrics
        record_tool_parser_invocation samples; api.pages: _Collected;
        engine.worker.report: kv_cache_usage scheduler_stats
  test  serve/test_several_models.py::test_metrics_and_status_tell_the_models_apart

chat completions | class | 0.27 | yes
  why   thoughts under both names, bytes of every token
  ours  api.serving.chats: Chats _create_chat_logprobs _create_chat_message bytes reasoning_effort; api.serving.fit:
        __class__
  test  api/serving/test_thinking.py::test_a_chat_returns_thoughts_under_both_names

completions | class | 0.27 | yes
  why   offsets are those in the text, and usage is counted as OpenAI does
  ours  api.serving.completions: Completions _create_completion_logprobs _extract_prompt_text
        text_offset tokens; api.serving.usage:
        num_cached_tokens token_ids; api.serving.fit: engine_client
  test  api/serving/test_token_bytes.py::test_a_completion_s_offsets_match_its_text

responses | class | 0.30 | yes
  why   a cut answer says so, and all of the conversation is read
  ours  api.serving.responses: Responses _create_response_logprobs _make_response_output_items
        _process_simple_streaming_events _render_resolved_response_inputs _validate_create_responses_input bytes
        effort input status; api.serving.input_items: content encrypted_content
  test  api/serving/test_to_the_letter.py::test_a_response_continues_from_the_whole_previous_one

kept responses | replaced | 0.27 | a store as an argument
  why   they outlive a worker and a full memory, each key's its own
  ours  api.keeping: _run_background_request _run_background_request_stream enable_store msg_store response_store
        responses_background_stream_generator
  test  api/test_stored_responses.py::test_a_background_answer_survives_its_worker

messages | class | 0.32 | yes
  why   they go on from an assistant's words, and end and fail as Anthropic's do
  ours  api.serving.messages: Messages __class__ _engine_reasoning_kwargs _make_parser add_generation_prompt
        continue_final_message num_cache_creation_tokens num_cached_tokens parser_cls reasoning_effort thinking
        thinking_token_budget tool_choice; api.serving.roles: Renderer _should_merge_inline_system;
        api.serving.thinking: _render_probe_prompt
  test  api/serving/test_to_the_letter.py::test_a_messages_stream_follows_anthropic_s_order

parsers of answers | class | 0.31 | yes
  why   the short way looks at them; ids and calls are told once
  ours  api.serving.streaming: _make_parser _make_response_parser; api.serving.fit: setattr;
        api.serving.telling: Telling __name__ arguments id reasoning_content tool_calls
  test  api/serving/test_agents.py::test_each_event_holds_a_tool_call_once

errors within streams | class | 0.27 | yes
  why   an error ends a stream as one, in each API's own form
  ours  api.serving.streaming: Transcriptions Translations create_streaming_error_response; api.streams:
        sequence_number
  test  api/test_streams.py::test_an_error_in_a_stream_is_an_event_in_each_dialect

long answers | replaced | 0.27 | no
  why   a million log-probabilities are made and written piece by piece
  ours  api.long_answers: setattr _LATE
  test  api/test_long_answers.py::test_the_pieces_equal_pydantic_s_json

the context's length in errors | replaced | 0.27 | yes
  why   clients shorten a conversation when they are told of it
  ours  api.serving.lengths: get_max_tokens; api.serving.responses: _validate_generator_input
  test  api/test_lengths.py::test_a_prompt_as_long_as_the_context_is_too_long

short prompts | class | 0.27 | yes
  why   they become tokens on the event loop: handing each to a thread takes longer than the work
  ours  api.serving.short_prompts: AtOnce _build_tokens_prompt _tokenize_prompt _wants_offsets; api.serving.fit:
        __class__
  test  api/test_openai_client.py::test_a_chat_counts_its_tokens

fields that a model does not know | replaced | 0.32 | yes
  why   answers are made of known fields, and the look for others takes longer than all the rest
  ours  api.serving.fit: __pydantic_decorators__ __log_extra_fields__; api.parsing: __private_attributes__
        delattr
  test  api/serving/test_answer_models.py::test_only_requests_are_looked_at

calls of many texts | replaced | 0.32 | yes
  why   a call of thousands takes turns with others
  ours  api.serving.many_texts: InPieces __name__ _executor _preprocessing engine_inputs json_response_cls
        merge_async_iterators
  test  api/serving/test_many_texts.py::test_a_large_call_leaves_room_for_others

requests and answers | subclass | 0.27 | yes
  why   what clients of these APIs send and expect besides
  ours  api.serving.requests: ChatCompletionRequest ResponsesRequest; api.serving.rerank: Rerank Ranked RerankAnswer
        Scores _build_response; api.served_tier: TieredUsage usage
  test  api/test_pooling.py::test_documents_may_be_objects_and_are_returned_on_request

media of requests | replaced | 0.27 | a filter of addresses
  why   fetched from public addresses alone; what is broken is the client's mistake
  ours  api.guards.media: get_async_client get_sync_client load_bytes
  test  api/guards/test_media.py::test_vllm_fetches_nothing_from_this_machine

aiohttp's connections | subclass | aiohttp 3.14 | some of it
  why   limits of heads and framing, half-closed clients, sockets that move on
  ours  api.connections.connection: Connection ConnectionServer _current_request _exception
        _keepalive _lingering_time _loop _message _message_tail _messages _request_count _upgraded _waiter;
        api.connections.exchange: LongBody _value buffer_size output_size; api.guards.body: _InMemory output_size
  test  api/test_connection.py::test_chunks_that_are_mostly_framing_are_refused
"""


class Seam(NamedTuple):
    """A row of the table."""

    what: str
    how: str
    since: str
    upstream: str
    why: str
    ours: dict[str, tuple[str, ...]]
    """By module of melld the names by which it reaches in."""
    test: str


def _seam(row: str) -> Seam:
    head, *rest = re.split(r"\n  (?:why|ours|test) +", row)
    why, ours, test = (" ".join(part.split()) for part in rest)
    modules = (part.partition(":") for part in ours.split("; "))
    what, how, since, upstream = head.split(" | ")
    named = {module: tuple(names.split()) for module, _, names in modules}
    return Seam(what, how, since, upstream, why, named, test)


SEAMS = tuple(_seam(row) for row in TABLE.strip().split("\n\n"))
