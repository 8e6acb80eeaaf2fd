"""A prompt that leaves no room for an answer: agents that are told so shorten their conversation."""

from typing import Any

import pytest

from tests.api.http_client import CHAT, COMPLETIONS, MODEL, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

PATHS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages")


def body_of(path: str, words: int) -> dict[str, Any]:
    """Return a prompt with one token per word."""
    text = "a" + " b" * words
    if path == "/v1/responses":
        return {"model": MODEL, "input": text, "max_output_tokens": 4}
    if path == COMPLETIONS:
        return completion(prompt=text)
    return chat(messages=[{"role": "user", "content": text}])


@pytest.mark.parametrize("limited", [True, False], ids=["limited", "unlimited"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_as_long_as_the_context_is_too_long(
    strict: DaemonProcess, path: str, streamed: bool, limited: bool
) -> None:
    """As for longer ones the code is `context_length_exceeded`, and the message gives both lengths."""
    usage = request(strict.url, "POST", path, body_of(path, 1)).json()["usage"]
    few = usage.get("prompt_tokens") or usage["input_tokens"]
    length = request(strict.url, "POST", "/tokenize", {"model": MODEL, "prompt": "x"}).json()["max_model_len"]
    body = body_of(path, 1 + length - few) | {"stream": streamed}
    if not limited and path != "/v1/messages":  # there it is required
        body = {name: value for name, value in body.items() if not name.startswith("max_")}
    answer = request(strict.url, "POST", path, body)
    error = answer.json()["error"]
    assert answer.status == 400, error
    assert f"is {length} tokens" in error["message"]
    assert f"contains {length} input tokens" in error["message"], error
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
    else:
        assert error["code"] == "context_length_exceeded", error
        assert error["param"] in ("messages", "prompt", "input"), error
