"""vLLM's encoding of requests and outputs, for the fleet.

The codec exists before vLLM is imported; the fleet first uses it for a request or output, which vLLM makes.
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
        """Return the request with its tensors inline, which vLLM would keep in separate buffers."""
        [encoded] = self._encoder.encode(core_request)
        return bytes(encoded)

    def decode_outputs(self, buffers: Sequence[bytes], engine_index: int) -> Any:
        """Return the outputs of one step, marked with the worker's index (the `engine` label of vLLM's metrics)."""
        outputs = self._decoder.decode(buffers)
        outputs.engine_index = engine_index
        return outputs
