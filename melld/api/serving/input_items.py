"""Items of a conversation on `/v1/responses`, in the form that vLLM reads.

Owns the form in which a client keeps reasoning for the server.  Agents that store nothing on the server (such as Codex)
send reasoning back only in the field for OpenAI's encrypted reasoning.  Here it holds the text, encoded but not
encrypted: the client has read it anyway.
"""

import base64
import contextlib
from collections.abc import Iterable
from typing import Any

from openai.types.responses import ResponseOutputMessage, ResponseOutputText, ResponseReasoningItem
from openai.types.responses.response_reasoning_item import Content

INCLUDE = "reasoning.encrypted_content"
OURS = "melld1:"


def is_kept_by_client(request: Any) -> bool:
    """Return True if the client asks for reasoning it can keep."""
    return INCLUDE in (request.include or ())


def close(item: Any) -> None:
    """Put the text of a reasoning item into the form in which clients keep it; leave other items alone."""
    if isinstance(item, ResponseReasoningItem) and item.content:
        text = "".join(one.text for one in item.content)
        item.encrypted_content = OURS + base64.b64encode(text.encode()).decode()


def with_types(items: list[Any]) -> list[Any]:
    """Return a client's items, with the type added to assistant messages that lack it, as OpenAI allows."""
    return [
        item | {"type": "message"} if isinstance(item, dict) and _is_answer(item) and "type" not in item else item
        for item in items
    ]


def readable(items: Iterable[Any]) -> list[Any]:
    """Return a request's items with all of their content where vLLM looks for it.

    Drop reasoning that cannot be read here: the conversation may have begun on another server.
    """
    found = []
    for item in items:
        if isinstance(item, ResponseReasoningItem):
            _open(item)
            if not item.summary and not item.content:
                continue
        elif isinstance(item, ResponseOutputMessage):
            _join(item)
        elif isinstance(item, dict) and _is_answer(item):
            item["content"] = "".join(_text(part) for part in item["content"])
        found.append(item)
    return found


def _is_answer(item: dict[str, Any]) -> bool:
    return item.get("role") == "assistant" and isinstance(item.get("content"), list)


def _open(item: ResponseReasoningItem) -> None:
    """Restore reasoning that a client has kept."""
    kept, item.encrypted_content = item.encrypted_content or "", None
    if not item.content and kept.startswith(OURS):
        with contextlib.suppress(ValueError):
            text = base64.b64decode(kept.removeprefix(OURS), validate=True).decode()
            item.content = [Content(text=text, type="reasoning_text")]


def _join(message: ResponseOutputMessage) -> None:
    """Join the parts of a message: vLLM reads only the first, and fails on a refusal."""
    text = "".join(_text(part.model_dump()) for part in message.content)
    message.content = [ResponseOutputText(text=text, type="output_text", annotations=[])]


def _text(part: dict[str, Any]) -> str:
    return str(part.get("text") or part.get("refusal") or "")
