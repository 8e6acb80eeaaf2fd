"""A model that embeds: what a client of `/v1/embeddings` relies on."""

import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def embedder(demo_model: Path) -> Iterator[DaemonProcess]:
    """The demo model, its last hidden state as the answer."""
    with DaemonProcess(demo_model, "--device", "cpu:1", "--set", 'model.vllm.runner="pooling"') as process:
        yield process.wait_ready()


@pytest.fixture
def client(embedder: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_equal_texts_have_equal_embeddings_and_others_have_not(client: openai.OpenAI) -> None:
    """The vectors mean something: of unit length, in the order of the texts, and told apart."""
    answer = client.embeddings.create(model="demo", input=["a block table", "another text", "a block table"])
    first, other, again = (entry.embedding for entry in answer.data)
    assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-3)
    assert math.isclose(sum(a * b for a, b in zip(first, again, strict=True)), 1.0, rel_tol=1e-3)
    assert sum(a * b for a, b in zip(first, other, strict=True)) < 0.9
    assert answer.usage.prompt_tokens > 0


def test_a_chat_with_a_model_that_only_embeds_is_refused(client: openai.OpenAI) -> None:
    """The wrong kind of call gets an error that says so, not a hang."""
    with pytest.raises(openai.BadRequestError, match="does not support"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])


def test_nothing_is_printed_but_what_concerns_the_user(embedder: DaemonProcess, client: openai.OpenAI) -> None:
    """The line to paste is one that this model answers, and no library warns into the log."""
    client.embeddings.create(model="demo", input="x")
    embedder.stop()
    printed = "\n".join(embedder.lines)
    assert "/v1/embeddings" in printed
    assert "Warning" not in printed
