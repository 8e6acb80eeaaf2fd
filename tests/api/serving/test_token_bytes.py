"""Log-probabilities of characters that span several tokens: bytes, offsets and alternatives."""

import json
from typing import Any

import pytest

from melld.engine.frontend.tokens.texts import bytes_of
from tests.api.http_client import CHAT, COMPLETIONS, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

RESPONSES = "/v1/responses"
TEXT = "x\U0001f642\u65e5\u672c\u00e9"
NOT_SHOWN = ("<|begin|>", "<|end|>", "<|im_end|>")
SAID = {"structured_outputs": {"choice": [TEXT]}, "temperature": 0}


def events(body: bytes) -> list[Any]:
    """Return the events of a stream."""
    lines = (line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {"))
    return [json.loads(line) for line in lines]


def choices(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the first choice of a whole answer, or of each chunk of a stream."""
    answer = request(daemon.url, "POST", path, body)
    assert answer.status == 200, answer.body
    told = events(answer.body) if body.get("stream") else [answer.json()]
    return [one["choices"][0] for one in told if one["choices"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_s_token_bytes_add_up_to_its_text(daemon: DaemonProcess, stream: bool) -> None:
    """Clients that colour an answer by token join these bytes, and the alternatives' bytes differ."""
    asked = chat(**SAID, max_tokens=40, logprobs=True, top_logprobs=5, stream=stream)
    told = [entry for one in choices(daemon, CHAT, asked) for entry in (one["logprobs"] or {}).get("content", ())]
    said = [entry for entry in told if entry["token"] not in NOT_SHOWN]
    assert b"".join(bytes(entry["bytes"]) for entry in said) == TEXT.encode()
    assert len(said) > len(TEXT)
    for entry in said:
        assert entry["token"]
        assert bytes_of(entry["token"]) == bytes(entry["bytes"])
        assert len({one["token"] for one in entry["top_logprobs"]}) == 5


def test_a_chat_cut_inside_a_character_returns_the_bytes_so_far(daemon: DaemonProcess) -> None:
    """What the text cannot show is not lost."""
    (cut,) = choices(daemon, CHAT, chat(**SAID, max_tokens=3, logprobs=True))
    told = b"".join(bytes(entry["bytes"]) for entry in cut["logprobs"]["content"])
    assert len(told) == 3
    assert TEXT.encode().startswith(told)
    assert told.decode(errors="ignore") == cut["message"]["content"]


def checked(logprobs: list[Any], text: str) -> list[int]:
    """Return the offsets of a completion's tokens, checked against its text when none is hidden."""
    tokens = [token for one in logprobs for token in one["tokens"]]
    offsets: list[int] = [offset for one in logprobs for offset in one["text_offset"]]
    said = b""
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset == len(said.decode(errors="ignore")), (token, offset)
        said += b"" if token in NOT_SHOWN else bytes_of(token)
    assert said == text.encode()
    return offsets


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("echo", [False, True], ids=["answer", "echo"])
def test_a_completion_s_offsets_match_its_text(daemon: DaemonProcess, echo: bool, stream: bool) -> None:
    """The prompt's begin token is not in the text, and part of a character shares that character's offset."""
    prompt = "a\U0001f642\u00e9\u2014b"
    asked = completion(**SAID, prompt=prompt, max_tokens=40, logprobs=5, echo=echo, stream=stream)
    told = choices(daemon, COMPLETIONS, asked)
    text = "".join(one["text"] for one in told)
    assert text == (prompt + TEXT if echo else TEXT)
    logprobs = [one["logprobs"] for one in told if one["logprobs"] is not None]
    assert checked(logprobs, text)
    for alternatives in (one for part in logprobs for one in part["top_logprobs"][1:]):
        assert len(alternatives) >= 5


def test_offsets_continue_per_prompt_and_choice(daemon: DaemonProcess) -> None:
    """Each text has its own."""
    asked = completion(**SAID | {"temperature": 1}, prompt=["a", "b"], max_tokens=40, logprobs=1, n=2)
    whole = request(daemon.url, "POST", COMPLETIONS, asked).json()["choices"]
    streamed: dict[int, list[Any]] = {}
    for one in choices(daemon, COMPLETIONS, asked | {"stream": True}):
        streamed.setdefault(one["index"], []).append(one["logprobs"])
    assert sorted(streamed) == [0, 1, 2, 3]
    for told in (*streamed.values(), *([one["logprobs"]] for one in whole)):
        assert checked(told, TEXT)


@pytest.mark.parametrize("prompt", ["\U0001f642b", [69, 70], [0, 69, 70], "<|im_start|>a"], ids=str)
def test_an_echoed_prompt_s_offsets_match_the_shown_text(daemon: DaemonProcess, prompt: Any) -> None:
    """Special tokens are counted where the text has them, and nowhere else."""
    (alone,) = choices(daemon, COMPLETIONS, completion(prompt=prompt, echo=True, max_tokens=0, logprobs=1))
    text, logprobs = alone["text"], alone["logprobs"]
    pieces = zip(logprobs["text_offset"], [*logprobs["text_offset"][1:], len(text)], logprobs["tokens"], strict=True)
    for start, end, token in pieces:
        assert token.startswith("bytes:") or text[start:end] in (token, "")


def test_a_long_answer_s_offsets_do_not_restart(daemon: DaemonProcess) -> None:
    """Log-probabilities that are built piece by piece belong to one text."""
    asked = {"structured_outputs": {"regex": f"({TEXT}){{30}}"}, "temperature": 0, "max_tokens": 800}
    (whole,) = choices(daemon, COMPLETIONS, completion(**asked, logprobs=1))
    assert len(whole["logprobs"]["tokens"]) > 300
    assert checked([whole["logprobs"]], whole["text"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_s_token_bytes_add_up_to_its_text(daemon: DaemonProcess, stream: bool) -> None:
    """As in a chat."""
    asked = {"input": "x", "max_output_tokens": 40, "include": ["message.output_text.logprobs"], "top_logprobs": 5}
    answer = request(daemon.url, "POST", RESPONSES, asked | SAID | {"stream": stream})
    assert answer.status == 200, answer.body
    if stream:
        parts = [one for one in events(answer.body) if one["type"] == "response.output_text.delta"]
    else:
        parts = [answer.json()["output"][0]["content"][0]]
    told = [entry for part in parts for entry in part["logprobs"] if entry["token"] not in NOT_SHOWN]
    if not stream:  # the events that OpenAI defines have no bytes
        assert b"".join(bytes(entry["bytes"]) for entry in told) == TEXT.encode()
    assert b"".join(bytes_of(entry["token"]) for entry in told) == TEXT.encode()
