"""What the fleet reads of a request when it admits it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from melld.ids import RequestId
from tests.serve.offline_daemon import OfflineDaemon


@pytest.mark.parametrize(
    ("token_ids", "embeds", "tokens"),
    [([1] * 20, None, 20), (None, torch.zeros(20, 8), 20), ([0] * 20, torch.zeros(20, 8), 20)],
    ids=["tokens", "embeddings", "both"],
)
async def test_a_prompt_of_tokens_or_of_embeddings_is_admitted(token_ids: Any, embeds: Any, tokens: int) -> None:
    """With `enable_prompt_embeds` a client sends a tensor, and room is found for as many tokens as it has rows."""
    daemon = OfflineDaemon()
    core_request = SimpleNamespace(
        request_id="a", prompt_token_ids=token_ids, prompt_embeds=embeds, priority=0, cache_salt=None
    )
    daemon.fleet.admit(core_request)
    assert daemon.fleet.live[RequestId("a")].prompt_tokens == tokens
