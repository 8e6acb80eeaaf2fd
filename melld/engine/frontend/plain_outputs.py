"""A shortcut past most of vLLM's output processing, for outputs that hold only the next tokens.

Owns which outputs those are, how they count in vLLM's statistics, and the tokens of non-streamed answers: nobody reads
those before the end, so they are decoded in batches.  `melld.engine.frontend.outlet` handles streams.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

AT_ONCE = 64
"""Tokens of a non-streamed answer that are decoded together."""

Take = Callable[[Any, float, Any], bool]
"""Does the work of vLLM's output processor for an output (with its time and the step's statistics); True if it did."""


def before_vllm(states: Mapping[str, Any], process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `process_outputs`, which gets the outputs that a state's own `take` does not accept."""

    def process_rest(outputs: list[Any], timestamp_s: float, stats: Any, **more: Any) -> Any:
        rest = []
        for output in outputs:
            take = getattr(states.get(output.request_id), "take", None)
            if take is None or not take(output, timestamp_s, stats):
                rest.append(output)
        return process_outputs(rest, timestamp_s, stats, **more)

    return process_rest


def says_more(output: Any) -> bool:
    """Return True if an `EngineCoreOutput` holds more than the next tokens."""
    return (
        output.finish_reason is not None
        or output.events is not None
        or output.new_logprobs is not None
        or output.new_prompt_logprobs_tensors is not None
        or output.kv_transfer_params is not None
        or output.ec_transfer_params is not None
        or output.routed_experts is not None
        or output.new_sampling_mask is not None
        or output.num_nans_in_logits != 0
    )


def count(token_ids: list[int], timestamp_s: float, stats: Any, of_request: Any) -> None:
    """Count tokens, other than a request's first, as vLLM's `IterationStats.update_from_output` does."""
    stats.num_generation_tokens += len(token_ids)
    of_request.num_generation_tokens += len(token_ids)
    stats.inter_token_latencies_iter.append(timestamp_s - of_request.last_token_ts)
    of_request.last_token_ts = timestamp_s


def is_added(waiting: Any, text: str, token_ids: list[int]) -> bool:
    """Append a stream's next text to an output that has not been read yet; return False if there is none."""
    if waiting is None or isinstance(waiting, Exception):
        return False
    waiting.outputs[0].text += text
    waiting.outputs[0].token_ids += token_ids
    return True


def is_plain(state: Any) -> bool:
    """Return True if a request's tokens become only text, without logprobs."""
    has_text = hasattr(state.detokenizer, "_last_output_text_offset")
    return has_text and not state.streaming_input and state.logprobs_processor.num_logprobs is None


def gather(state: Any) -> None:
    """Collect the tokens of a request whose answer is not streamed and has no stop strings."""
    from vllm.sampling_params import RequestOutputKind

    if state.output_kind is RequestOutputKind.FINAL_ONLY and is_plain(state) and not state.detokenizer.stop:
        state.take = _gathering(state.detokenizer, state.stats)


def _gathering(detokenizer: Any, of_request: Any) -> Take:
    gathered: list[int] = []
    is_first = True

    def take(output: Any, timestamp_s: float, stats: Any) -> bool:
        nonlocal is_first
        if is_first or says_more(output):
            is_first = False
            detokenizer.update(gathered, False)
            gathered.clear()
            return False
        count(output.new_token_ids, timestamp_s, stats, of_request)
        gathered.extend(output.new_token_ids)
        if len(gathered) >= AT_ONCE:
            detokenizer.update(gathered, False)
            gathered.clear()
        return True

    return take


def parses_nothing(parse: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if vLLM's parser would pass on any further text as plain content."""
    from vllm.parser.abstract_parser import DelegatingParser

    parser, request = parse.__self__, arguments["request"]
    names = "parse_delta", "_extract_tool_calls_streaming", "_in_tool_call_phase"
    kind = getattr(parser, "telling_of", type(parser))
    if not all(getattr(kind, name, None) is getattr(DelegatingParser, name) for name in names):
        return False
    state = parser._stream_state  # noqa: SLF001
    asks_nothing = state.tool_call_text_started and request.tool_choice == "none"
    return bool(state.reasoning_ended and asks_nothing and not state.engine_based)


def is_alone(state: Any) -> bool:
    """Return True if each of the request's outputs is sent separately."""
    return state.parent_req is None and state.stream_interval == 1


def piece(output: Any, text: str, token_ids: list[int]) -> Any:
    """Return part of an output, or of what came before it."""
    part = copy.copy(output)
    part.finished = False
    first = output.outputs[0]
    part.outputs = [type(first)(first.index, text, token_ids, None, None)]
    return part
