"""vLLM's encoding of requests and outputs, for the fleet.

It is created before vLLM is imported: the fleet first uses it for a request or an output, which only vLLM can make.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any


class EngineCodec:
    """vLLM's implementation of `engine.fleet.ports.Codec`."""

    @functools.cached_property
    def _encoder(self) -> Any:
        from vllm.v1.serial_utils import MsgpackEncoder

        return MsgpackEncoder(size_threshold=sys.maxsize)

    @functools.cached_property
    def _decoder(self) -> Any:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        return MsgpackDecoder(EngineCoreOutputs)

    def encode_request(self, core_request: Any) -> bytes:
        """Return the request with its tensors inline; vLLM would put them into separate buffers."""
        [encoded] = self._encoder.encode(core_request)
        return bytes(encoded)

    def decode_outputs(self, buffers: Sequence[bytes], engine_index: int) -> Any:
        """Return the outputs of one step, marked with the worker's index (the `engine` label of vLLM's metrics)."""
        outputs = self._decoder.decode(buffers)
        outputs.engine_index = engine_index
        outputs.weight_version = None  # it never changes here, but vLLM would check for each token
        return outputs

    def join_outputs(self, waiting: Any, outputs: Any) -> bool:
        """Give each request one output with the tokens of both steps, as after speculative decoding.

        The statistics of the later step stay where they are: they contain counters.
        """
        last = {output.request_id: output for output in waiting.outputs}
        for output in outputs.outputs:
            before = last.get(output.request_id)
            if before is None or not _continues(output):
                waiting.outputs.append(output)
                last[output.request_id] = output
            else:
                before.new_token_ids += output.new_token_ids
                before.finish_reason, before.stop_reason = output.finish_reason, output.stop_reason
        waiting.timestamp = outputs.timestamp
        outputs.outputs = []
        return True


def _continues(output: Any) -> bool:
    """Return True if an `EngineCoreOutput` holds only the next tokens, and perhaps that they are the last.

    One that holds more is kept apart, behind the one before it.
    """
    return (
        output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.events is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.prefill_stats is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
        and output.mm_cache_miss_hashes is None
        and output.new_sampling_mask is None
        and output.spec_decode_metrics is None
        and output.prompt_token_id_logprobs is None
    )
