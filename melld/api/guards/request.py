"""Refuses requests by their JSON, before vLLM's models see them.

Pure: a JSON object in, a `Refusal` (400, with `param`) or nothing out.  Refuses fields that would reach into the engine
past the API (transfer parameters, templates), fields that would be silently ignored, and shapes that vLLM's models
would drop or report unclearly.  `melld.api.guards.work` limits the work of a call after parsing; vLLM checks the rest.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeGuard

import msgspec

from melld.api.answers import bad
from melld.api.parsing import TEXTS
from melld.config_server import ServerConfig
from melld.engine.frontend.schema import Budget, check_schema
from melld.nested import containers

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Each would have an effect that clients must not have, or none where they expect one.
REFUSED = {
    "kv_transfer_params": "kv_transfer_params is not available to clients",
    "ec_transfer_params": "ec_transfer_params is not available to clients",
    "data_parallel_rank": "melld chooses the worker",
    "guided_json": "guided_json was removed: use response_format or structured_outputs",
    "guided_regex": "guided_regex was removed: use structured_outputs",
    "guided_choice": "guided_choice was removed: use structured_outputs",
    "guided_grammar": "guided_grammar was removed: use structured_outputs",
    "functions": "functions was replaced by tools",
    "conversation": "conversations are not stored: use previous_response_id",
}
TOOLS_FACTOR = 8
TOOL_VALUES = 20
"""Values that a tool counts for besides its schema: vLLM compares each tool with all others."""
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "output_format")
_TEMPLATE_KEYS = ("chat_template", "tokenize")
_SAID = {"messages", "input", *TEXTS}


class Trust(msgspec.Struct, frozen=True):
    """Permissions that the operator and the model give clients, by options of `[model.vllm]`."""

    chat_template: bool = False
    multimodal_kwargs: bool = False
    local_media: bool = False
    no_tools_because: str = ""
    """Why the model's tool calls cannot be read; empty if they can."""


def check_request(body: dict[str, Any], limits: ServerConfig, trust: Trust) -> None:
    """Refuse a request that must not reach vLLM.

    Raises:
        Refusal, InvalidSchema, TooManyValues: 400, with the field as `param`.
    """
    budget = Budget()
    _check_refused(body, trust)
    _check_ids(body)
    if "messages" in body:
        _check_messages(body["messages"], limits, budget)
    if not trust.local_media:
        for name, said in body.items():
            if name in _SAID:
                _check_media(said, name, budget)
    for name in ("messages", "input"):
        _check_history(body.get(name), name, limits)
    _check_tools(body, trust)
    _check_constraints(body, limits.max_constraint_bytes)
    for schema in _tool_schemas(body.get("tools"), budget):
        check_schema(schema, "tools", budget)


def is_request_id(name: object) -> TypeGuard[str]:
    """Return True if the text is a valid request id."""
    return isinstance(name, str) and REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: object, param: str) -> None:
    """Refuse an id that is not at most 128 plain characters: it goes into logs, decision logs and headers."""
    if name is not None and not is_request_id(name):
        raise bad(param, f"{param} may have at most 128 characters, of A-Z a-z 0-9 . _ : -")


def _check_refused(body: dict[str, Any], trust: Trust) -> None:
    for name, why in REFUSED.items():
        if body.get(name) is not None:
            raise bad(name, why)
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise bad("best_of", "best_of must equal n: request n choices and pick one")
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        for name in extra.keys() & REFUSED.keys():
            raise bad(f"vllm_xargs.{name}", REFUSED[name])
    if not trust.chat_template:
        if body.get("chat_template") is not None:
            raise bad("chat_template", "this server uses its own chat template")
        overrides = body.get("chat_template_kwargs")
        if isinstance(overrides, dict) and any(overrides.get(key) is not None for key in _TEMPLATE_KEYS):
            raise bad("chat_template_kwargs", "this server uses its own chat template")
    if not trust.multimodal_kwargs:
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if body.get(name):
                raise bad(name, f"{name} is not available to clients of this server")


def _check_ids(body: dict[str, Any]) -> None:
    for name in ("request_id", "session_id"):
        check_request_id(body.get(name), name)


def _check_messages(messages: object, limits: ServerConfig, budget: Budget) -> None:
    roles = ROLES | set(limits.extra_roles)
    if not isinstance(messages, list):
        raise bad("messages", "messages must be a list")
    if not messages:
        raise bad("messages", "messages is empty")
    budget.spend(len(messages), "messages")
    count = 0
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad(f"messages.{index}", "each message must be an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in roles:
            raise bad(f"messages.{index}.role", f"role must be one of {', '.join(sorted(roles))}")
        if not isinstance(message.get("content"), str | list | None):
            raise bad(f"messages.{index}.content", "content must be a string or a list of parts")
        parts = _listed(message.get("content"))
        count += 1 + len(parts)
        _check_count(count, "messages", limits)
        shown = [one for part in parts for one in _listed(_inside(part, "content"))]
        budget.spend(len(shown), "messages")
        if any(_inside(one, "type") == "image" and not isinstance(one.get("source", {}), dict) for one in shown):
            raise bad(f"messages.{index}.content", "a tool image's source must be an object")


def _check_history(entries: object, name: str, limits: ServerConfig) -> None:
    """Limit the length of a conversation: vLLM blocks the event loop while it goes through it."""
    if not isinstance(entries, list) or not entries or isinstance(entries[0], int):  # numbers: a prompt's tokens
        return
    objects = [one for one in entries if isinstance(one, dict)]
    calls = [call for one in objects for call in _listed(one.get("tool_calls"))]
    count = len(objects) + len(calls) + sum(len(_listed(one.get("content"))) for one in objects)
    _check_count(count, name, limits)
    arguments = [_inside(call, "arguments") for call in (*objects, *(_inside(call, "function") for call in calls))]
    characters = sum(len(one) for one in arguments if isinstance(one, str))
    if characters > limits.max_tool_arguments:
        raise bad(name, f"the arguments of tool calls have at most {limits.max_tool_arguments} characters together")


def _check_count(count: int, name: str, limits: ServerConfig) -> None:
    if count > limits.max_message_parts:
        raise bad(name, f"{name} holds at most {limits.max_message_parts} messages, parts and tool calls, not {count}")


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_media(messages: object, name: str, budget: Budget) -> None:
    """Refuse messages whose parts name a file of this machine."""
    messages = [messages] if isinstance(messages, dict) else messages
    if not isinstance(messages, list) or not messages or isinstance(messages[0], int):  # numbers: a prompt's tokens
        return
    budget.spend(len(messages), name)
    for index, message in enumerate(messages):
        content = _inside(message, "content")
        for part in containers(content) if isinstance(content, list) else ():
            budget.spend(1 + len(part), name)
            if isinstance(part, dict) and _names_files(part):
                raise bad(f"{name}.{index}.content", "files on the server are not available to clients")


def _names_files(part: dict[str, Any]) -> bool:
    found = (url for key, url in part.items() if key.endswith(("url", "uri", "image", "source")))
    return any(isinstance(url, str) and url[:16].strip().lower().startswith("file:") for url in found)


def _check_tools(body: dict[str, Any], trust: Trust) -> None:
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if trust.no_tools_because and body.get("tools") and kind != "none":
        raise bad("tools", trust.no_tools_because)
    if kind not in (None, "none", "auto") and not body.get("tools"):
        raise bad("tool_choice", "tool_choice requires tools")


def _check_constraints(body: dict[str, Any], most_bytes: int) -> None:
    """Limit the size of constraints; a judge finds out whether they compile (`melld.engine.frontend.judges`)."""
    if not isinstance(body.get("structured_outputs"), dict | None):  # vLLM takes it for one before it looks
        raise bad("structured_outputs", "structured_outputs must be an object")
    for names, most in ((_CONSTRAINTS, most_bytes), (("tools",), TOOLS_FACTOR * most_bytes)):
        for name in names:
            if body.get(name) is not None and len(msgspec.json.encode(body[name])) > most:
                raise bad(name, f"{name} may have at most {most} bytes")


def _tool_schemas(tools: object, budget: Budget) -> Iterator[object]:
    """Yield every tool's JSON schema.  Some of vLLM's tool parsers compile them in this process."""
    tools = tools if isinstance(tools, list) else []
    budget.spend(TOOL_VALUES * len(tools), "tools")
    for tool in tools:
        schema = _inside(_inside(tool, "function") or tool, "parameters") or _inside(tool, "input_schema")
        if schema is not None:
            yield schema


def _inside(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, dict) else None
