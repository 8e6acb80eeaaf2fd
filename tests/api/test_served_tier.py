"""Every answer names the tier that served it, where its API has a field for it: whole or streamed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.http_client import API_KEY, CHAT, COMPLETIONS, MODEL, chat, completion, connect, post, request
from tests.api.test_streams import until
from tests.serve.daemon_process import DaemonProcess

SERVED = [
    ({}, "default"),
    ({"service_tier": None}, "default"),
    ({"service_tier": "auto"}, "default"),
    ({"service_tier": "flex"}, "flex"),
    ({"service_tier": "priority"}, "default"),  # beyond what this daemon allows
    ({"priority": 7}, "flex"),
    ({"service_tier": "flex", "priority": 0}, "default"),
]
RESPONSE = {"input": "Hello", "max_output_tokens": 2}


def answered(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> Any:
    answer = request(daemon.url, "POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json()


def events(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> Iterator[Any]:
    answer = request(daemon.url, "POST", path, body | {"stream": True})
    assert answer.status == 200, answer.body
    for line in answer.body.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(("asked", "tier"), SERVED)
def test_openai_answers_and_chunks_name_the_tier(strict: DaemonProcess, asked: dict[str, Any], tier: str) -> None:
    """A client reads what it got, not what it asked for."""
    for path, body in ((CHAT, chat(**asked)), (COMPLETIONS, completion(**asked))):
        assert answered(strict, path, body)["service_tier"] == tier
        chunks = list(events(strict, path, body | {"stream_options": {"include_usage": True}}))
        assert len(chunks) >= 2, "text, in one chunk where the stream was read late, and usage"
        assert {chunk["service_tier"] for chunk in chunks} == {tier}
    assert answered(strict, "/v1/responses", RESPONSE | asked)["service_tier"] == tier
    told = [event["response"] for event in events(strict, "/v1/responses", RESPONSE | asked) if "response" in event]
    assert [one["service_tier"] for one in told] == [tier] * 3, "created, in progress, completed"


@pytest.mark.parametrize(("asked", "tier"), [*SERVED, ({"service_tier": "standard_only"}, "default")])
def test_anthropic_usage_names_the_tier(strict: DaemonProcess, asked: dict[str, Any], tier: str) -> None:
    """Its clients know `standard`, `priority` and `batch`, and expect it where a stream begins."""
    word = {"default": "standard", "flex": "batch"}[tier]
    whole = answered(strict, "/v1/messages", chat(**asked))
    assert whole["usage"]["service_tier"] == word
    assert whole["usage"]["output_tokens"] == 4
    first, *_ = events(strict, "/v1/messages", chat(**asked))
    assert (first["type"], first["message"]["usage"]["service_tier"]) == ("message_start", word)


def test_the_official_clients_set_and_read_the_tier(strict: DaemonProcess) -> None:
    """No extra field, no cast: theirs."""
    from anthropic import Anthropic  # 2 s in each process that reads this file

    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key=API_KEY, max_retries=0) as client:
        response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2, service_tier="flex")
        assert response.service_tier == "flex"
    with Anthropic(base_url=strict.url, api_key=API_KEY, max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "Hello"}], service_tier="standard_only"
        )
        assert message.usage.service_tier == "standard"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_status_and_metrics_show_request_urgency(strict: DaemonProcess, path: str) -> None:
    """Whichever API the requests came by."""
    body = chat(priority=7, stream=True, max_tokens=16_000, ignore_eos=True)
    with connect(strict.url) as connection:
        connection.sendall(post(body, path))
        assert connection.recv(12) == b"HTTP/1.1 200"
        [found] = request(strict.url, "GET", "/status").json()["requests"]
        metrics = request(strict.url, "GET", "/metrics").body.decode()
    assert (found["tier"], found["priority"]) == ("flex", 7)
    counts = re.findall(r'melld_requests_by_tier{model="demo",state="(.*)",tier="(.*)"} (.*)', metrics)
    assert {(tier, state): float(count) for state, tier, count in counts} == {
        (tier, state): float((tier, state) == ("flex", "running"))
        for tier in ("priority", "default", "flex")
        for state in ("running", "waiting")
    }
    until(lambda: request(strict.url, "GET", "/status").json()["requests"] == [])
