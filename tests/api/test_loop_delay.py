"""Nothing that a client sizes stalls other streams: the loop turns while bodies are read, judged and answered."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.api.http_client import CHAT, COMPLETIONS, request
from tests.forked import ForkedPython

LONGEST_S = 0.05
TRIES = 12
"""What a body does, it does each time: the least of so many is held against the limit, as a processor is half as quick
while its other half works."""
BODY_BYTES = 8 << 20
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


class Body(NamedTuple):
    """A prefix, a unit repeated up to `size`, and a suffix."""

    name: str
    path: str
    prefix: bytes
    unit: bytes
    suffix: bytes
    size: int = BODY_BYTES

    def build(self) -> bytes:
        count = (self.size - len(self.prefix) - len(self.suffix)) // len(self.unit)
        return (self.prefix + self.unit * count).rstrip(b",") + self.suffix


WORDS_FOR_OBJECTS = b'{"messages":[{"role":"user","content":"a"}],"system":['
PART = b'{"type":"text","text":"a"},'
BODIES = [
    Body("tokens", COMPLETIONS, b'{"prompt":[', b"1,", b"]}"),
    Body("300000-tokens", COMPLETIONS, b'{"prompt":[', b"1,", b"]}", 600_000),
    Body("tokens-and-a-word", COMPLETIONS, b'{"prompt":[', b"1,", b'"x"]}', 600_000),
    Body("negative-tokens", COMPLETIONS, b'{"prompt":[', b"-1,", b"]}", 900_000),
    Body("lists-of-tokens", COMPLETIONS, b'{"prompt":[', b"[1],", b"]}"),
    Body("lists-of-a-word", COMPLETIONS, b'{"prompt":[', b'["x"],', b"]}", 290_000),
    Body("texts", COMPLETIONS, b'{"prompt":[', b'"a",', b"]}"),
    Body("one-text-of-commas", COMPLETIONS, b'{"prompt":"', b"[,", b'"}'),
    Body("one-text-of-escapes-within", COMPLETIONS, b'{"prompt":"', b'\\"[', b'","max_tokens":"x"}', 4_400_000),
    Body("one-text-of-escapes", COMPLETIONS, b'{"prompt":"', b'\\"[', b'"}'),
    Body("pairs", CHAT, b'{"messages":"', b"\\ud83d\\ude00", b'"}'),
    Body("unknown-field", COMPLETIONS, b'{"prompt":"a","x":[', b"{},", b"]}"),
    Body("allowed-words", COMPLETIONS, b'{"prompt":"a","allowed_token_ids":[', b'"x",', b"]}", 1_200_000),
    Body("wrong-words", COMPLETIONS, b'{"prompt":"a","bad_words":[', b"1,", b"]}", 590_000),
    Body("words-for-objects", COUNT, WORDS_FOR_OBJECTS, b'"a",', b"]}", 1_190_000),
    Body("wrong-choices", COMPLETIONS, b'{"prompt":"a","structured_outputs":{"choice":[', b"1,", b"]}}", 130_000),
    Body("arguments", COMPLETIONS, b'{"prompt":"a","vllm_xargs":{"a":[', b"{},", b"]}}", 150_000),
    Body("messages", CHAT, b'{"messages":[', b'{"role":"user","content":"a"},', b"]}"),
    Body("20000-messages", CHAT, b'{"messages":[', b'{"role":"user","content":"a"},', b"]}", 580_000),
    Body("wrong-messages", CHAT, b'{"messages":[', b'{"role":"tool","content":[5]},', b"]}", 290_000),
    Body("parts", CHAT, b'{"messages":[{"role":"user","content":[', PART, b"]}]}", 500_000),
    Body("wrong-parts", CHAT, b'{"messages":[{"role":"user","content":[', b"{},", b"]}]}", 50_000),
    Body("wrong-inputs", RESPONSES, b'{"input":[', b"{},", b"]}", 100_000),
    Body("inputs", RESPONSES, b'{"input":[', b'{"role":"user","content":"a"},', b"]}", 200_000),
    Body("wrong-parts-of-inputs", RESPONSES, b'{"input":[{"role":"user","content":[', b"{},", b"]}]}", 16_000),
    Body("wrong-actions", RESPONSES, b'{"input":[{"type":"computer_call","actions":[', b"{},", b"]}]}", 1_570),
    Body("wrong-tools", RESPONSES, b'{"input":"a","tools":[', b"{},", b"]}", 100_000),
    Body(
        "blocks",
        MESSAGES,
        b'{"model":"m","max_tokens":1,"messages":[',
        b'{"role":"user","content":"a"},',
        b"]}",
        580_000,
    ),
    Body("embedded", "/v1/embeddings", b'{"input":[', b"{},", b"]}", 100_000),
    Body("wrong-tokens", "/detokenize", b'{"tokens":[', b'"x",', b"]}", 500_000),
    Body("nested", COMPLETIONS, b'{"prompt":', b"[", b"}"),
]


TOKENIZE = "/tokenize"
TOKEN = 200
"""A part of a character, see `loop_app`."""
SAYS = {"role": "user", "content": "a"}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
CALLED = {"role": "tool", "tool_call_id": "x", "content": "1"}
TOOL = {"type": "object", "properties": {"a": {"type": "string"}}}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}
WITH_LOGPROBS = {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}


class Asked(NamedTuple):
    """A well-formed call at a limit or beyond one."""

    name: str
    path: str
    fields: dict[str, Any] | Callable[[], dict[str, Any]]
    """As a function where they take long to make: every process collects all tests."""
    status: int = 200


def _tool(index: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}", "parameters": TOOL}}


def _call_with(values: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({str(value): value for value in range(values)})}
    return {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}


CALLS_AT_THEIR_WORST = [
    Asked("prompt-logprobs", COMPLETIONS, {"prompt": [TOKEN] * 5000, "prompt_logprobs": 1}),
    Asked("prompt-logprobs-of-choices", COMPLETIONS, {"prompt": [TOKEN] * 39, "prompt_logprobs": 1, "n": 128}),
    Asked("prompt-logprobs-of-prompts", COMPLETIONS, {"prompt": [[TOKEN] * 19] * 256, "prompt_logprobs": 1}),
    Asked("prompt-logprobs-of-a-chat", CHAT, {"messages": [SAYS], "prompt_logprobs": 20}),
    Asked("echo", COMPLETIONS, {"prompt": [TOKEN] * 5000, "logprobs": 1, "echo": True}),
    Asked("echo-streamed", COMPLETIONS, {"prompt": [TOKEN] * 5000, "logprobs": 1, "echo": True, "stream": True}),
    Asked("logprobs-of-a-chat", CHAT, {"messages": [SAYS], "max_tokens": 4000} | LOGPROBS),
    Asked("logprobs-of-choices", CHAT, {"messages": [SAYS], "max_tokens": 32, "n": 128} | LOGPROBS),
    Asked("logprobs-of-a-completion", COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "logprobs": 20}),
    Asked("logprobs-of-a-response", RESPONSES, {"input": "a", "max_output_tokens": 1000} | WITH_LOGPROBS),
    Asked("prompts", COMPLETIONS, {"prompt": [[TOKEN] * 1000] * 256}),
    Asked("choices", COMPLETIONS, {"prompt": [TOKEN] * 7800, "n": 128, "return_token_ids": True}),
    Asked("too-many-choices", COMPLETIONS, {"prompt": [TOKEN] * 32000, "n": 128}, 400),
    Asked("a-long-text", COMPLETIONS, {"prompt": "a " * 3_900_000}, 400),
    Asked("a-text-echoed", COMPLETIONS, {"prompt": "a " * 30_000, "echo": True}),
    Asked("conversation", CHAT, {"messages": [SAYS] * 3000}),
    Asked("too-long-a-conversation", CHAT, {"messages": [SAYS] * 3001}, 400),
    Asked("conversation-with-calls", CHAT, {"messages": [CALLS, CALLED] * 500}),
    Asked("conversation-of-messages", MESSAGES, {"model": "m", "messages": [SAYS] * 3000}),
    Asked("conversation-of-responses", RESPONSES, {"input": [SAYS] * 3000}),
    Asked("conversation-tokenized", TOKENIZE, {"messages": [SAYS] * 3000}),
    Asked("tokens-as-strings", TOKENIZE, {"prompt": "a " * 50_000, "return_token_strs": True}),
    Asked("too-many-tokens-as-strings", TOKENIZE, {"prompt": "a " * 200_000, "return_token_strs": True}, 400),
    Asked("tools", CHAT, {"messages": [SAYS], "tools": [_tool(index) for index in range(300)]}),
    Asked("bad-words", COMPLETIONS, {"prompt": "a", "bad_words": ["x y " * 78] * 64}),
    Asked("too-long-bad-words", COMPLETIONS, {"prompt": "a", "bad_words": ["x y " * 20_000] * 64}, 400),
    Asked("stop-strings", COMPLETIONS, {"prompt": "a", "stop": ["x" * 25_000] * 4, "max_tokens": 100}),
    Asked("too-long-stop-strings", COMPLETIONS, {"prompt": "a", "stop": ["x" * 1_900_000] * 4}, 400),
    Asked("bias", COMPLETIONS, {"prompt": ["a"] * 15, "logit_bias": {str(token): 1 for token in range(2000)}}),
    Asked(
        "too-much-bias",
        COMPLETIONS,
        {"prompt": ["a"] * 256, "logit_bias": {str(token): 1 for token in range(2000)}},
        400,
    ),
    Asked("stop-tokens", COMPLETIONS, {"prompt": ["a"] * 250, "stop_token_ids": [TOKEN + 1] * 2000}),
    Asked("too-many-stop-tokens", COMPLETIONS, {"prompt": ["a"] * 256, "stop_token_ids": [TOKEN + 1] * 100_000}, 400),
    Asked(
        "constrained-prompts",
        COMPLETIONS,
        lambda: {"prompt": ["a"] * 256, "structured_outputs": {"choice": [f"{number:x}" for number in range(15_000)]}},
    ),
    Asked(
        "template-arguments",
        CHAT,
        lambda: {"messages": [SAYS], "chat_template_kwargs": {str(number): "x" for number in range(100_000)}},
        400,
    ),
    Asked("arguments", CHAT, lambda: {"messages": [_call_with(250_000), SAYS]}, 400),
]


class App(NamedTuple):
    """The app of `loop_app`."""

    url: str
    asked: IO[str]
    told: IO[str]

    def longest_s(self) -> float:
        """Return the longest CPU time between two turns of the loop since the last call."""
        self.asked.write("\n")
        self.asked.flush()
        return float(self.told.readline())

    def least_s(self, ask: Callable[[], None]) -> float:
        """Return the least of several tries, stopping at the first that is short enough."""
        found = []
        for _ in range(TRIES):
            self.longest_s()
            ask()
            found.append(self.longest_s())
            if found[-1] < LONGEST_S:
                break
        return min(found)


@pytest.fixture(scope="module")
def app(demo_model: Path) -> Iterator[App]:
    """An API with an instant worker: only the daemon's own part is measured."""
    with running(demo_model, "generate") as app:
        request(app.url, "POST", COMPLETIONS, {"prompt": "the first of its kind imports and caches"})
        yield app


@contextlib.contextmanager
def running(model: Path, runner: str) -> Iterator[App]:
    """The app, run by a vLLM runner."""
    command = [sys.executable, "-m", "tests.api.loop_app", str(model), runner]
    environment = os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT
    with ForkedPython(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield App(process.stdout.readline().strip(), process.stdin, process.stdout)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_the_loop_keeps_turning_whatever_the_body(app: App, body: Body) -> None:
    """One client's megabytes do not pause everybody's streams."""
    sent = body.build()

    def ask() -> None:
        answer = request(app.url, "POST", body.path, sent)
        assert answer.status == 400, answer.body[:500]
        assert len(answer.body) < 5000

    assert app.least_s(ask) < LONGEST_S


@pytest.mark.parametrize("asked", CALLS_AT_THEIR_WORST, ids=lambda asked: asked.name)
def test_the_loop_keeps_turning_whatever_is_asked_for(app: App, asked: Asked) -> None:
    """Nor does one client's large answer, long conversation or pile of prompts."""
    one_token = {"max_output_tokens" if asked.path == RESPONSES else "max_tokens": 1}
    fields = asked.fields if isinstance(asked.fields, dict) else asked.fields()
    sent = json.dumps((one_token if asked.path != TOKENIZE else {}) | fields).encode()

    def ask() -> None:
        answer = request(app.url, "POST", asked.path, sent)
        assert answer.status == asked.status, answer.body[:500]

    assert app.least_s(ask) < LONGEST_S


@pytest.mark.parametrize("text", ["a text of some words", pytest.param([TOKEN] * 100, marks=pytest.mark.long)])
def test_the_loop_keeps_turning_while_many_texts_are_embedded(demo_model: Path, text: str | list[int]) -> None:
    """Vector stores are filled by calls of two thousand texts, with two million numbers in each answer."""
    sent = json.dumps({"input": [text] * 2048}).encode()

    def ask() -> None:
        answer = request(app.url, "POST", "/v1/embeddings", sent)
        assert answer.status == 200, answer.body[:500]

    with running(demo_model, "pooling") as app:
        assert app.least_s(ask) < LONGEST_S
