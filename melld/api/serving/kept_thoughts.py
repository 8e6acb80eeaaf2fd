"""Thoughts that a client of `/v1/responses` keeps for the server, and sends back with the next request.

Agents that store nothing on the server (Codex among them) send a thought back only in the field for OpenAI's encrypted
ones.  Here it is the thought's text, encoded and not encrypted: the client has read it anyway.
"""

import base64
import contextlib
from typing import Any

from openai.types.responses import ResponseReasoningItem
from openai.types.responses.response_reasoning_item import Content

INCLUDE = "reasoning.encrypted_content"
OURS = "melld1:"


def is_kept_by_client(request: Any) -> bool:
    """Return True if the client asks for thoughts in this form."""
    return INCLUDE in (request.include or ())


def close(item: Any) -> None:
    """Put an item's thought, if it is one, into the form in which clients keep it."""
    if isinstance(item, ResponseReasoningItem) and item.content:
        text = "".join(one.text for one in item.content)
        item.encrypted_content = OURS + base64.b64encode(text.encode()).decode()


def opened(item: Any) -> bool:
    """Put back the thought that a client has kept; return False if the item is a thought that nobody here can read.

    Such a thought was made elsewhere: a conversation may have begun with another server.
    """
    if not isinstance(item, ResponseReasoningItem):
        return True
    kept, item.encrypted_content = item.encrypted_content or "", None
    if not item.content and kept.startswith(OURS):
        with contextlib.suppress(ValueError):
            text = base64.b64decode(kept.removeprefix(OURS), validate=True).decode()
            item.content = [Content(text=text, type="reasoning_text")]
    return bool(item.summary or item.content)
