"""How command-line programs are set up and called: their words, variables and files."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_NONE: Mapping[str, str] = MappingProxyType({})


class Agent(NamedTuple):
    """A program; `$URL`, `$PROMPT` and `$HOME` stand for what they are in its words, variables and files."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = _NONE
    files: Mapping[str, str] = _NONE
    """By their paths in its home."""


_COMPATIBLE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$URL/v1", "apiKey": "none"},
    "models": {"demo": {"limit": {"context": 131072, "output": 8192}}},
}
_PI = {"baseUrl": "$URL/v1", "api": "openai-completions", "apiKey": "none", "models": [{"id": "demo"}]}
_CODEX = """
model = "demo"
model_provider = "melld"
[model_providers.melld]
name = "melld"
base_url = "$URL/v1"
"""
_LLM = """
- {model_id: demo, model_name: demo, api_base: $URL/v1, supports_tools: true}
"""
_WEATHER = """
def get_weather(city: str, degrees: int) -> str:
    print(f"get_weather({city}, {degrees})")
    return "sunny"
"""
_AIDER = ("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--edit-format", "whole")
AGENTS = {
    "codex": Agent(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "$PROMPT"),
        files={".codex/config.toml": _CODEX},
    ),
    "claude": Agent(
        ("claude", "-p", "$PROMPT", "--allowedTools", "Bash"),
        {
            "ANTHROPIC_BASE_URL": "$URL",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "demo",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        ("opencode", "run", "--auto", "--model", "melld/demo", "$PROMPT"),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {".config/opencode/opencode.json": json.dumps({"provider": {"melld": _COMPATIBLE}, "share": "disabled"})},
    ),
    "qwen": Agent(
        ("qwen", "--auth-type", "openai", "--yolo", "$PROMPT"),
        {"OPENAI_BASE_URL": "$URL/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo"},
    ),
    "pi": Agent(
        ("pi", "--provider", "melld", "--model", "demo", "-p", "$PROMPT"),
        {"PI_OFFLINE": "1"},
        {".pi/agent/models.json": json.dumps({"providers": {"melld": _PI}})},
    ),
    "aider": Agent(
        ("aider", *_AIDER, "--model", "openai/demo", "--message", "$PROMPT"),
        {"OPENAI_API_BASE": "$URL/v1", "OPENAI_API_KEY": "none", "AIDER_ANALYTICS": "false"},
    ),
    "llm": Agent(
        ("llm", "-m", "demo", "--key", "none", "--functions", _WEATHER, "$PROMPT"),
        {"LLM_USER_PATH": "$HOME/llm"},
        {"llm/extra-openai-models.yaml": _LLM},
    ),
}
