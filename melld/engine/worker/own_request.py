"""Requests of a worker's own: to warm its engine up, and to measure it.  Nobody hears of what they bring.

Owns how one is made.  Its name keeps it apart from the users'.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.core import EngineCore


def add_own_request(
    engine: "EngineCore", name: str, token_ids: list[int], parameters: "SamplingParams | PoolingParams"
) -> None:
    """Have the engine compute this prompt; `parameters` say whether it is for sampling or for pooling."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    samples = isinstance(parameters, SamplingParams)
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=parameters if samples else None,
        pooling_params=None if samples else parameters,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    prepared, _ = engine.preprocess_add_request(request)
    engine.add_request(prepared)
