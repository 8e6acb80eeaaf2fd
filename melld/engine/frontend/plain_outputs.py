"""A shortcut past most of vLLM's output processing, for the next tokens of a request without an output.

Owns whose tokens take it, how they count in vLLM's statistics, and the tokens of non-streamed answers: nobody reads
those before the end, so they are decoded in batches.  `melld.engine.frontend.outlet` handles streams.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from melld.ids import RequestId

AT_ONCE = 64
"""Tokens of a non-streamed answer that are decoded together."""
MOST_AT_ONCE = 128
"""Requests whose tokens are taken in one turn of the loop: after as many, vLLM too lets others run."""


class Plain(Protocol):
    """Does the work of vLLM's output processor for a request's next tokens: the attribute `plain` of its state."""

    def add(self, token_ids: list[int]) -> None:
        """Take the next tokens."""

    def hand_back(self) -> None:
        """Bring vLLM's detokenizer up to date: it gets the next output."""


class Counts:
    """As much of vLLM's `IterationStats` as tokens count that continue answers; stands among a step's outputs."""

    mm_cache_miss_hashes = None

    def __init__(self) -> None:
        self.num_generation_tokens = 0
        self.inter_token_latencies_iter: list[float] = []

    def add_to(self, stats: Any) -> None:
        """Count them in the statistics of the whole step."""
        stats.num_generation_tokens += self.num_generation_tokens
        stats.inter_token_latencies_iter += self.inter_token_latencies_iter


def before_vllm(states: Mapping[str, Any], process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `process_outputs`, which gets the outputs of requests whose tokens are not plain."""

    def process_rest(outputs: list[Any], timestamp_s: float, stats: Any, **more: Any) -> Any:
        rest = []
        for output in outputs:
            if isinstance(output, Counts):
                output.add_to(stats)
                continue
            state = states.get(output.request_id)
            if (plain := getattr(state, "plain", None)) is not None:
                try:
                    plain.hand_back()
                except Exception as error:  # noqa: BLE001  see `_fail`
                    _fail(state, error)
            if not isinstance(getattr(state, "plain", None), Failed):
                rest.append(output)
        return process_outputs(rest, timestamp_s, stats, **more)

    return process_rest


Tokens = Iterable[tuple[RequestId, list[int]]]
"""Requests with their next tokens."""
Others = list[tuple[RequestId, list[int]]]
"""Those whose outputs vLLM processes."""


def take_all(states: Mapping[str, Any], tokens: Tokens, timestamp_s: float) -> Counts | None:
    """Take tokens that are all plain, and return what they count; else leave them as they are."""
    plain, others = _sorted(states, tokens)
    if others:
        return None
    _take(plain, timestamp_s, counts := Counts())
    return counts


def take_plain(states: Mapping[str, Any], tokens: Tokens, timestamp_s: float, counts: Counts) -> Others:
    """Take those that are plain, and return the others."""
    plain, others = _sorted(states, tokens)
    _take(plain, timestamp_s, counts)
    return others


def _sorted(states: Mapping[str, Any], tokens: Tokens) -> tuple[list[tuple[Any, Plain, list[int]]], Others]:
    plain, others = [], []
    for request, token_ids in tokens:
        if (state := states.get(request)) is None:  # it was aborted
            continue
        taker: Plain | None = getattr(state, "plain", None)
        if taker is None or state.is_prefilling:
            others.append((request, token_ids))
        else:
            plain.append((state, taker, token_ids))
    return plain, others


def _take(plain: list[tuple[Any, Plain, list[int]]], timestamp_s: float, counts: Counts) -> None:
    """Count the tokens as vLLM's `IterationStats.update_from_output` does, and give them to their takers."""
    latencies_s = counts.inter_token_latencies_iter
    for state, taker, token_ids in plain:
        of_request, count = state.stats, len(token_ids)
        counts.num_generation_tokens += count
        of_request.num_generation_tokens += count
        latencies_s.append(timestamp_s - of_request.last_token_ts)
        of_request.last_token_ts = timestamp_s
        try:
            taker.add(token_ids)
        except Exception as error:  # noqa: BLE001  see `_fail`
            _fail(state, error)


class Failed:
    """Takes what still comes for a request whose tokens could not be decoded, until its caller has aborted it."""

    def add(self, token_ids: list[int]) -> None:
        """See `Plain`."""

    def hand_back(self) -> None:
        """See `Plain`."""


def _fail(state: Any, error: Exception) -> None:
    """Raise an error where its request's outputs are read, which aborts it: it is no other request's."""
    state.plain = Failed()
    state.queue.put(error)


def is_added(waiting: Any, text: str, token_ids: list[int]) -> bool:
    """Append a stream's next text to an output that has not been read yet; return False if there is none."""
    if waiting is None or isinstance(waiting, Exception):
        return False
    waiting.outputs[0].text += text
    waiting.outputs[0].token_ids += token_ids
    return True


def decoded(detokenizer: Any, token_ids: list[int]) -> str:
    """Add a request's next tokens to those of its detokenizer, and return their text."""
    if (text_of := getattr(detokenizer, "text_of", None)) is not None and (text := text_of(token_ids)):
        detokenizer.token_ids.extend(token_ids)
        return str(text)
    text = ""
    for token in token_ids:  # vLLM's slow detokenizer decodes the last one that it knows
        detokenizer.token_ids.append(token)
        text += detokenizer.decode_next(token)
    return str(text)


def is_plain(state: Any) -> bool:
    """Return True if a request's tokens become only text, without logprobs."""
    has_text = hasattr(state.detokenizer, "_last_output_text_offset")
    return has_text and not state.streaming_input and state.logprobs_processor.num_logprobs is None


def gather(state: Any) -> None:
    """Collect the tokens of a request whose answer is not streamed and has no stop strings."""
    from vllm.sampling_params import RequestOutputKind

    if state.output_kind is RequestOutputKind.FINAL_ONLY and is_plain(state) and not state.detokenizer.stop:
        state.plain = Gathered(state.detokenizer)


class Gathered:
    """The tokens of such a request that its detokenizer does not know yet."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []

    def add(self, token_ids: list[int]) -> None:
        """See `Plain`."""
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


class CatchUp:
    """What a stream's client has been told that the serving class has not seen yet."""

    def __init__(self) -> None:
        self.ids = list[int]()
        self.texts = list[str]()
        self._parts = list[str]()  # of the parser's messages
        self._message: Any = None

    def add_message(self, message: Any, part: str) -> None:
        """Add a message of the parser, and its only text."""
        self._message = message
        self._parts.append(part)

    def message_of(self, field: str) -> Any:
        """Return one message in the place of all; None if there were none."""
        return self._message.model_copy(update={field: "".join(self._parts)}) if self._parts else None

    def output(self, like: Any) -> Any:
        """Return one output in the place of all."""
        return piece(like, "".join(self.texts), self.ids)
