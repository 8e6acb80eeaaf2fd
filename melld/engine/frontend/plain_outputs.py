"""A shortcut past most of vLLM's output processing, for outputs that hold only the next tokens.

Owns which outputs those are, how they count in vLLM's statistics, and the tokens of non-streamed answers: nobody reads
those before the end, so they are decoded in batches.  `melld.engine.frontend.outlet` handles streams.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

AT_ONCE = 64
"""Tokens of a non-streamed answer that are decoded together."""


class Plain(Protocol):
    """Does the work of vLLM's output processor for a request's plain outputs: the attribute `plain` of its state."""

    def add(self, token_ids: list[int], timestamp_s: float, stats: Any) -> None:
        """Take the next tokens, and count them in the step's statistics."""

    def hand_back(self) -> None:
        """Bring vLLM's detokenizer up to date: it gets the next output."""


class NextTokens:
    """As much of vLLM's `IterationStats` as plain outputs count."""

    def __init__(self) -> None:
        self.num_generation_tokens = 0
        self.inter_token_latencies_iter: list[float] = []


def before_vllm(states: Mapping[str, Any], process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `process_outputs`, which gets the outputs that are not plain."""

    def process_rest(outputs: list[Any], timestamp_s: float, stats: Any, **more: Any) -> Any:
        rest = []
        for output in outputs:
            state = states.get(output.request_id)
            plain: Plain | None = getattr(state, "plain", None)
            if plain is not None and is_next(state, output):
                _try(state, plain.add, output.new_token_ids, timestamp_s, stats)
                continue
            if plain is not None:
                _try(state, plain.hand_back)
            if not isinstance(getattr(state, "plain", None), Failed):
                rest.append(output)
        return process_outputs(rest, timestamp_s, stats, **more)

    return process_rest


def take_step(states: Mapping[str, Any], step: Any) -> NextTokens | None:
    """Take a step whose outputs are all plain, and return what it counts; else leave it as it is."""
    plain_outputs = []
    for output in step.outputs:
        state = states.get(output.request_id)
        if state is None:  # it was aborted
            continue
        plain: Plain | None = getattr(state, "plain", None)
        if plain is None or not is_next(state, output):
            return None
        plain_outputs.append((state, plain, output.new_token_ids))
    stats, timestamp_s = NextTokens(), step.timestamp
    for state, plain, token_ids in plain_outputs:
        _try(state, plain.add, token_ids, timestamp_s, stats)
    return stats


class Failed:
    """Takes what still comes for a request whose tokens could not be decoded, until its caller has aborted it."""

    def add(self, *_: Any) -> None:
        """See `Plain`."""

    def hand_back(self) -> None:
        """See `Plain`."""


def _try(state: Any, take: Callable[..., None], *arguments: Any) -> None:
    """Do something for a request; what fails there is no other request's error."""
    try:
        take(*arguments)
    except Exception as error:  # noqa: BLE001  raised where the request's outputs are read, which aborts it
        state.plain = Failed()
        state.queue.put(error)


def is_next(state: Any, output: Any) -> bool:
    """Return True if an output only continues its request's answer."""
    return not state.is_prefilling and not says_more(output)


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
        state.plain = Gathered(state.detokenizer, state.stats)


class Gathered:
    """The tokens of such a request that its detokenizer does not know yet."""

    def __init__(self, detokenizer: Any, of_request: Any) -> None:
        self._detokenizer = detokenizer
        self._of_request = of_request
        self._token_ids: list[int] = []

    def add(self, token_ids: list[int], timestamp_s: float, stats: Any) -> None:
        """See `Plain`."""
        count(token_ids, timestamp_s, stats, self._of_request)
        self._token_ids += token_ids
        if len(self._token_ids) >= AT_ONCE:
            self.hand_back()

    def hand_back(self) -> None:
        """See `Plain`."""
        self._detokenizer.update(self._token_ids, False)
        self._token_ids.clear()


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
