"""Live moves by tokens: the destination computes the request's tokens while the source still decodes.

Owns shadow requests.  A shadow has the first tokens of the request as its prompt, ends after one token that nobody is
told, and leaves its blocks in the prefix cache.  The next one has some more, and computes only those: slices, each of
which makes its step longer by what the other requests of this worker may be delayed.  If `reserve` then finds all
blocks, only the last block and the tokens since remain to compute after the freeze, however long the request is.  A
paced request (`migrate/pacing`) gets its next slice when that is due, or when no other request runs.

    warm ──► slice, slice, ... among the others' steps ──► take_warmed ──► reserve (at once: nothing evicts between)
"""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.rules import adapter_refusal
from melld.migrate.pacing import SlicePace
from melld.migrate.snapshot import WARM_SUFFIX
from melld.scheduler.steptimes import StepTimes

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore

SLICE_S = 0.04
"""Time by which one slice may delay the requests that decode here."""
FIRST_SLICE_TOKENS = 128
MAX_SLICE_TOKENS = 8192


class _Warming(msgspec.Struct):
    """A request being warmed: the tokens of its full blocks, and how many of them are computed or under way."""

    original: Any
    tokens: list[int]
    pace: SlicePace
    begun_tokens: int = 0
    is_between: bool = True
    """True if no slice is under way."""


class Warmers:
    """The shadow requests of one engine, whose steps take these times."""

    def __init__(self, engine: "EngineCore", times: StepTimes) -> None:
        self._engine = engine
        self._times = times
        self._scheduler: Any = engine.scheduler
        self._warming: dict[str, _Warming] = {}

    def begin(self, core_request: bytes, output_token_ids: list[int], tokens_per_s: float = 0.0) -> bool:
        """Start to compute the request's full blocks, at most `tokens_per_s` (0: no limit) beside others.

        Returns False if there is nothing to gain (no prefix cache, no full block), and for a request with images.
        """
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        original = MsgpackDecoder(EngineCoreRequest).decode(core_request)
        if original.mm_features or adapter_refusal(self._engine, original):  # a slice may end within an image
            return False
        tokens = [*original.prompt_token_ids, *output_token_ids]
        full = len(tokens) // self._scheduler.block_size * self._scheduler.block_size
        if not full or not self._scheduler.kv_cache_manager.enable_caching or original.request_id in self._warming:
            return False
        pace = SlicePace(tokens_per_s, int(self._scheduler.block_size))
        warming = _Warming(original, tokens[:full], pace)
        warming.begun_tokens = self._cached_tokens(warming)
        if warming.begun_tokens + self._scheduler.block_size >= full:  # the last block is recomputed in any case
            return False
        self._warming[original.request_id] = warming
        self._next_slice(warming)
        return True

    def take(self, outputs: "EngineCoreOutputs | None") -> list[str]:
        """Remove the shadows' outputs from a step's; return the requests whose blocks are now in the prefix cache."""
        if outputs is None or not self._warming:
            return []
        done, others = [], []
        for output in outputs.outputs:
            request_id = output.request_id.removesuffix(WARM_SUFFIX)
            warming = self._warming.get(request_id) if request_id != output.request_id else None
            if warming is None:
                others.append(output)
            elif output.finish_reason is not None:
                if warming.begun_tokens < len(warming.tokens):
                    warming.is_between = True
                else:
                    del self._warming[request_id]
                    done.append(request_id)
        outputs.outputs = others
        return done

    def go_on(self) -> None:
        """Start the slices that are due; call it before each step, and before the engine goes idle."""
        for warming in self._warming.values():
            is_due = warming.is_between and time.monotonic() >= warming.pace.due_s
            if is_due or (warming.is_between and not self._scheduler.has_unfinished_requests()):
                self._next_slice(warming)

    def cancel(self, request_id: str) -> None:
        """Stop warming for this request, if it is being warmed."""
        if self._warming.pop(request_id, None) is not None:
            self._engine.abort_requests([request_id + WARM_SUFFIX])

    def _next_slice(self, warming: _Warming) -> None:
        """Add a shadow with one more slice of tokens; those of the last one are in the prefix cache."""
        wanted = warming.pace.slice_tokens(self._slice_tokens())
        tokens = min(wanted, len(warming.tokens) - warming.begun_tokens)
        warming.is_between = False
        warming.begun_tokens += tokens
        self._engine.add_request(self._shadow(warming, warming.begun_tokens))
        warming.pace.began(tokens, time.monotonic())

    def _shadow(self, warming: _Warming, tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams

        shadow = msgspec.structs.replace(
            warming.original,
            request_id=warming.original.request_id + WARM_SUFFIX,
            prompt_token_ids=warming.tokens[:tokens],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        )
        return self._engine.preprocess_add_request(shadow)[0]

    def _cached_tokens(self, warming: _Warming) -> int:
        shadow = self._shadow(warming, len(warming.tokens))
        _, tokens, _ = self._scheduler.kv_cache_manager.get_computed_blocks(shadow)
        return int(tokens) // int(self._scheduler.block_size) * int(self._scheduler.block_size)

    def _slice_tokens(self) -> int:
        """Return how many tokens a slice may have: whole blocks, as only those stay cached."""
        block, tokens, costs = int(self._scheduler.block_size), FIRST_SLICE_TOKENS, self._times.costs
        if costs is not None:
            tokens = self._times.prompt_tokens_within(costs.base_s + SLICE_S, 0) or tokens
        return max(block, min(tokens, MAX_SLICE_TOKENS) // block * block)
