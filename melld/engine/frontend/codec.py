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

    def decode_outputs(self, buffers: Sequence[bytes]) -> Any:
        """See `Codec`."""
        return self._decoder.decode(buffers)
