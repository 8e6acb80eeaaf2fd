"""Live moves by tokens: the destination computes what the request has so far while the source still decodes.

Owns shadow requests.  A shadow has the tokens of the request as its prompt, is prefilled in chunks like any other, ends
after one token that nobody is told, and leaves its blocks in the prefix cache, where `reserve` finds them: what is then
left to compute after the request was frozen is its last block and the tokens since, however long it is.

    warm ──► chunks of prefill, among the others' steps ──► take_warmed ──► reserve (at once: nothing evicts between)
"""

from typing import TYPE_CHECKING, Any

import msgspec

from melld.migrate.snapshot import WARM_SUFFIX

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore


class Warmers:
    """The shadow requests of one engine."""

    def __init__(self, engine: "EngineCore") -> None:
        self._engine = engine
        self._scheduler: Any = engine.scheduler
        self._warming: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._warming)

    def begin(self, core_request: bytes, output_token_ids: list[int]) -> bool:
        """Start to compute the request's full blocks.  False where that is for nothing: no prefix cache, no block."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        original = MsgpackDecoder(EngineCoreRequest).decode(core_request)
        tokens = [*original.prompt_token_ids, *output_token_ids]
        full = len(tokens) // self._scheduler.block_size * self._scheduler.block_size
        if not full or not self._scheduler.kv_cache_manager.enable_caching or original.request_id in self._warming:
            return False
        shadow = msgspec.structs.replace(
            original,
            request_id=original.request_id + WARM_SUFFIX,
            prompt_token_ids=tokens[:full],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        )
        prepared, _ = self._engine.preprocess_add_request(shadow)
        self._engine.add_request(prepared)
        self._warming.add(original.request_id)
        return True

    def take(self, outputs: "EngineCoreOutputs | None") -> list[str]:
        """Remove the shadows' outputs from a step's; the requests whose blocks are in the prefix cache now."""
        if outputs is None or not self._warming:
            return []
        done, others = [], []
        for output in outputs.outputs:
            request_id = output.request_id.removesuffix(WARM_SUFFIX)
            if request_id == output.request_id or request_id not in self._warming:
                others.append(output)
            elif output.finish_reason is not None:
                self._warming.discard(request_id)
                done.append(request_id)
        outputs.outputs = others
        return done

    def cancel(self, request_id: str) -> None:
        """Stop to compute for this request, if it is being computed for."""
        if request_id in self._warming:
            self._warming.discard(request_id)
            self._engine.abort_requests([request_id + WARM_SUFFIX])
