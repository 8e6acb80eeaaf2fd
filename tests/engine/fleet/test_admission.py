"""What the fleet reads from a request when it admits it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import PoolingParams

from melld.errors import RequestTooLarge
from melld.ids import RequestId
from tests.serve.offline_daemon import BLOCK_TOKENS, BLOCKS, OfflineDaemon


@pytest.mark.parametrize(
    ("token_ids", "embeds", "tokens"),
    [([1] * 20, None, 20), (None, torch.zeros(20, 8), 20), ([0] * 20, torch.zeros(20, 8), 20)],
    ids=["tokens", "embeddings", "both"],
)
async def test_prompts_of_tokens_and_of_embeddings_are_admitted(token_ids: Any, embeds: Any, tokens: int) -> None:
    """With `enable_prompt_embeds` a client sends a tensor, which needs room for one token per row."""
    daemon = OfflineDaemon()
    core_request = SimpleNamespace(
        request_id="a",
        prompt_token_ids=token_ids,
        prompt_embeds=embeds,
        priority=0,
        cache_salt=None,
        pooling_params=None,
    )
    daemon.fleet.requests.admit(core_request)
    assert daemon.fleet.live[RequestId("a")].prompt_tokens == tokens


async def test_a_text_to_embed_may_fill_the_whole_context() -> None:
    """Nothing is generated, so no room for a token is needed; a prompt to be continued needs one more."""
    daemon = OfflineDaemon()
    full = [1] * (BLOCKS * BLOCK_TOKENS)
    asked = {"prompt_token_ids": full, "prompt_embeds": None, "priority": 0, "cache_salt": None}
    daemon.fleet.requests.admit(SimpleNamespace(request_id="text", pooling_params=PoolingParams(task="embed"), **asked))
    assert daemon.fleet.live[RequestId("text")].worker is not None
    with pytest.raises(RequestTooLarge):
        daemon.fleet.requests.admit(SimpleNamespace(request_id="prompt", pooling_params=None, **asked))
