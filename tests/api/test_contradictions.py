"""Parameters that together allow no token: an error instead of arbitrary text."""

import json
from typing import Any

import pytest

from tests.api.http_client import CHAT, COMPLETIONS, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

A = 69
"""The token of "a"."""
END = 1
AT_ONCE = {
    "a-bad-word": {"allowed_token_ids": [A], "bad_words": ["a"]},
    "no-end-yet": {"allowed_token_ids": [END], "min_tokens": 3},
    "no-end-yet-if-ignored": {"allowed_token_ids": [END], "min_tokens": 3, "ignore_eos": True},
    "a-stop-token-too-early": {"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 2},
}
LATER = {
    "a-bad-word": {"allowed_token_ids": [A], "bad_words": ["aa"]},
    "a-longer-one": {"allowed_token_ids": [A, END], "bad_words": ["aaa"], "min_tokens": 5, "logit_bias": {END: -100}},
    "the-end-of-a-structure": {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [A]},
    "a-word-of-a-structure": {"structured_outputs": {"choice": ["aaaa"]}, "bad_words": ["aa"]},
}


def asked(path: str, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a call with contradictory parameters."""
    return (chat if path == CHAT else completion)(**fields, max_tokens=8, **more)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_detectable_contradiction_is_refused(strict: DaemonProcess, name: str, path: str, temperature: int) -> None:
    """vLLM would emit a special token instead, which says nothing."""
    for stream in (False, True):
        answer = request(
            strict.url,
            "POST",
            path,
            asked(path, AT_ONCE[name], temperature=temperature, stream=stream, n=1 + temperature),
        )
        assert answer.status == 400, answer.body
        assert answer.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", LATER)
def test_a_contradiction_found_later_ends_in_an_error(strict: DaemonProcess, name: str, temperature: int) -> None:
    """What was streamed before is valid; if nothing was, the status code says it."""
    fields = LATER[name]
    answer = request(strict.url, "POST", COMPLETIONS, asked(COMPLETIONS, fields, temperature=temperature))
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] in fields
    answer = request(
        strict.url, "POST", COMPLETIONS, asked(COMPLETIONS, fields, temperature=temperature, stream=True, logprobs=0)
    )
    if answer.status != 200:
        assert answer.json()["error"]["param"] in fields
        return
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {")]
    *told, last = map(json.loads, lines)
    assert set("".join(one["choices"][0]["text"] for one in told)) == {"a"}
    assert {token for one in told for token in one["choices"][0]["logprobs"]["tokens"]} == {"a"}
    assert last["error"]["param"] in fields


def test_masks_that_leave_a_token_are_obeyed(strict: DaemonProcess) -> None:
    """However little they leave."""
    fields = {"allowed_token_ids": [A, A + 1], "bad_words": ["bb", "aaa"], "min_tokens": 8}
    answer = request(strict.url, "POST", COMPLETIONS, asked(COMPLETIONS, fields, temperature=1, n=4))
    assert answer.status == 200, answer.body
    for choice in answer.json()["choices"]:
        assert len(choice["text"]) == 8
        assert set(choice["text"]) <= {"a", "b"}
        assert not {"bb", "aaa"} & {choice["text"][i : i + n] for i in range(8) for n in (2, 3)}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_beam_search_refuses_fields_that_it_would_ignore(strict: DaemonProcess, path: str) -> None:
    """And runs when nothing is ignored."""
    answer = request(strict.url, "POST", path, asked(path, {"use_beam_search": True, "stop": ["a"]}, n=2))
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == "stop"
    answer = request(strict.url, "POST", path, asked(path, {"use_beam_search": True}, n=2))
    assert answer.status == 200, answer.body
    assert len(answer.json()["choices"]) == 2
