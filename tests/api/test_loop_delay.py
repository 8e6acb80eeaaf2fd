"""No body within the limits stops the other streams: the loop turns on while the worst ones are read and judged."""

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, NamedTuple

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.api.http_client import CHAT, COMPLETIONS, request

LONGEST_S = 0.05
TRIES = 3
"""On a busy machine the loop may be kept waiting while another thread works: what a body does, it does each time."""
BODY_BYTES = 8 << 20
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class Body(NamedTuple):
    """A prefix, a unit that is repeated up to `size`, and a suffix."""

    name: str
    path: str
    prefix: bytes
    unit: bytes
    suffix: bytes
    size: int = BODY_BYTES

    def build(self) -> bytes:
        count = (self.size - len(self.prefix) - len(self.suffix)) // len(self.unit)
        return (self.prefix + self.unit * count).rstrip(b",") + self.suffix


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
    Body("one-text-of-escapes-within", COMPLETIONS, b'{"prompt":"', b'\\"[', b'"}', 4_400_000),
    Body("one-text-of-escapes", COMPLETIONS, b'{"prompt":"', b'\\"[', b'"}'),
    Body("pairs", CHAT, b'{"messages":"', b"\\ud83d\\ude00", b'"}'),
    Body("unknown-field", COMPLETIONS, b'{"prompt":"a","x":[', b"{},", b"]}"),
    Body("allowed-words", COMPLETIONS, b'{"prompt":"a","allowed_token_ids":[', b'"x",', b"]}", 1_200_000),
    Body("arguments", COMPLETIONS, b'{"prompt":"a","vllm_xargs":{"a":[', b"{},", b"]}}", 150_000),
    Body("messages", CHAT, b'{"messages":[', b'{"role":"user","content":"a"},', b"]}"),
    Body("20000-messages", CHAT, b'{"messages":[', b'{"role":"user","content":"a"},', b"]}", 580_000),
    Body("wrong-messages", CHAT, b'{"messages":[', b'{"role":"tool","content":[5]},', b"]}", 290_000),
    Body("parts", CHAT, b'{"messages":[{"role":"user","content":[', PART, b"]}]}", 500_000),
    Body("wrong-parts", CHAT, b'{"messages":[{"role":"user","content":[', b"{},", b"]}]}", 50_000),
    Body("wrong-inputs", RESPONSES, b'{"input":[', b"{},", b"]}", 100_000),
    Body("inputs", RESPONSES, b'{"input":[', b'{"role":"user","content":"a"},', b"]}", 200_000),
    Body("wrong-parts-of-inputs", RESPONSES, b'{"input":[{"role":"user","content":[', b"{},", b"]}]}", 16_000),
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


class App(NamedTuple):
    """The program of `loop_app`."""

    url: str
    asked: IO[str]
    told: IO[str]

    def longest_s(self) -> float:
        """The longest time for which its loop has not turned, since this was asked last."""
        self.asked.write("\n")
        self.asked.flush()
        return float(self.told.readline())


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    """An API whose serving classes refuse everything: what is measured is the way to them."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.api.loop_app"]
    environment = os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        app = App(process.stdout.readline().strip(), process.stdin, process.stdout)
        request(app.url, "POST", COMPLETIONS, {"prompt": "the first of its kind imports and caches"})
        yield app


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_the_loop_turns_on_whatever_the_body(app: App, body: Body) -> None:
    """One client's megabytes are no pause in everybody's streams."""
    sent = body.build()
    longest_s = []
    for _ in range(TRIES):
        app.longest_s()
        answer = request(app.url, "POST", body.path, sent)
        longest_s.append(app.longest_s())
        assert answer.status in (400, 418), answer.body[:500]
        assert len(answer.body) < 5000
        if longest_s[-1] < LONGEST_S:
            return
    raise AssertionError(f"{longest_s}: {answer.body[:500]!r}")


def test_the_loop_turns_on_while_a_body_is_inflated(app: App) -> None:
    """What is small on the wire is not small here."""
    sent = gzip.compress(BODIES[0].build())
    longest_s = []
    for _ in range(TRIES):
        app.longest_s()
        assert request(app.url, "POST", COMPLETIONS, sent, {"Content-Encoding": "gzip"}).status == 400
        longest_s.append(app.longest_s())
    assert min(longest_s) < LONGEST_S
