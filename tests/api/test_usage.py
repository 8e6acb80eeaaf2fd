"""Reported usage: bills and caches are judged by it."""

import json
from typing import Any

import pytest

from tests.api.http_client import COMPLETIONS, completion, request
from tests.serve.daemon_process import DaemonProcess

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BLOCK = 32
"""Tokens that a cache keeps together."""
streamed_or_whole = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


def answered(daemon: DaemonProcess, *, streamed: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the usage and the text."""
    answer = request(daemon.url, "POST", COMPLETIONS, completion(**fields) | (STREAM if streamed else {}))
    assert answer.status == 200, answer.body
    if not streamed:
        return answer.json()["usage"], answer.json()["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    return events[-1]["usage"], "".join(event["choices"][0]["text"] for event in events[:-1])


@streamed_or_whole
def test_cached_tokens_of_all_prompts_are_summed(strict: DaemonProcess, streamed: bool) -> None:
    """A call of several prompts reports their sum, whichever finishes first."""
    prompts = [[5] * (BLOCK * blocks + 1) for blocks in (7, 3, 5)]
    salt = {"cache_salt": f"usage {streamed}"}
    first, _ = answered(strict, streamed=streamed, prompt=prompts[0], **salt)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    for some in (prompts, prompts[::-1]):
        usage, _ = answered(strict, streamed=streamed, prompt=some, **salt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == BLOCK * (7 + 3 + 5)
        assert usage["prompt_tokens"] == sum(map(len, prompts))


@streamed_or_whole
def test_a_prompt_that_is_only_scored_makes_no_token(strict: DaemonProcess, streamed: bool) -> None:
    """With `echo` and `max_tokens: 0` a harness gets its prompt's logprobs and pays for nothing else."""
    usage, text = answered(strict, streamed=streamed, echo=True, max_tokens=0, logprobs=1)
    assert text == "Hello"
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] > 0
