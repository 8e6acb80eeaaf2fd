"""What agents send, as recorded from them (`make clients ARGS="--record DIRECTORY"`) and shortened, is served."""

from types import SimpleNamespace
from typing import Any

import pytest

from melld.api.serving.telling import joined
from tests.api.http_client import MODEL, request
from tests.serve.daemon_process import DaemonProcess

RUN = {
    "name": "run",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
CODEX = {
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "run", "arguments": '{"cmd": "ls"}'}
        | {"status": "completed"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "Exit code: 0"},
    ],
    "tools": [
        RUN | {"type": "function"},
        {"type": "namespace", "name": "agents", "description": "More.", "tools": [RUN | {"type": "function"}]},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22000-1425-7821-b7ac-3836e2ded4a4",
    "client_metadata": {"session_id": "01a22000-1425-7821-b7ac-3836e2ded4a4"},
    "max_output_tokens": 4,
}
CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Go", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "There are agents."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"cmd": "ls"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "", "is_error": False}
                | {"cache_control": {"type": "ephemeral"}}
            ],
        },
    ],
    "tools": [{"name": "run", "description": "Runs.", "input_schema": RUN["parameters"]}],
    "metadata": {"user_id": '{"device_id": "4d45"}'},
    "max_tokens": 4,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", CODEX), ("/v1/messages?beta=true", CLAUDE_CODE)], ids=["codex", "claude code"]
)
def test_a_turn_of_an_agent_is_served(daemon: DaemonProcess, path: str, body: dict[str, Any], streamed: bool) -> None:
    """Agents send more than their API's reference documents, and stop at the first error."""
    answer = request(daemon.url, "POST", path, {"model": MODEL, "stream": streamed} | body)
    assert answer.status == 200, answer.body
    assert "error" not in answer.body.decode()


def test_an_agent_s_probe_of_the_server_is_answered(daemon: DaemonProcess) -> None:
    """Claude Code probes before its first call."""
    assert request(daemon.url, "HEAD", "/", None).status == 200


def test_each_event_holds_a_tool_call_once() -> None:
    """Instructor and others read only an event's first piece: arguments in a second one were lost."""

    def piece(index: int, **told: str) -> SimpleNamespace:
        return SimpleNamespace(index=index, function=SimpleNamespace(**{"name": None, "arguments": None} | told))

    name, first, second, other = piece(0, name="run"), piece(0, arguments='{"a'), piece(0, arguments='":1'), piece(1)
    assert joined([name, first, other, second]) == [name, other]
    assert vars(name.function) == {"name": "run", "arguments": '{"a":1'}
    assert joined([]) == []
