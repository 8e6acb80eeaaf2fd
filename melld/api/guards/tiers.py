"""Decides how urgent a request is, by its `priority` and its `service_tier`.

Pure: a parsed JSON body in, a number or a `Refusal` (400, with `param`) out.  Lower goes first.  Read from the body and
not from vLLM's models, most of which have no `service_tier`, and before anything else: under overload it decides who is
sent away.
"""

from typing import Annotated, Any

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from melld.api.answers import bad
from melld.api.keys import Client
from melld.config_values import MOST_PRIORITY

_PRIORITY = TypeAdapter(Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)])
TIERS: dict[str | None, int | None] = {
    "priority": -1,
    "fast": -1,  # which OpenAI answers as "priority"
    "default": 0,
    "standard_only": 0,  # Anthropic's
    "flex": 1,
    "auto": None,  # as if nothing was asked for
    "scale": None,
}


class Rights(msgspec.Struct, frozen=True):
    """Limits on how urgent a client's requests may be."""

    priority: int = 0
    """The priority of those that ask for none."""
    least: int | None = None
    """The most urgent that they may ask for; None: any."""

    def may(self, priority: int) -> bool:
        """Return True if a request may ask for this priority."""
        return self.least is None or priority >= self.least


def rights_of(client: Client, least: int | None) -> Rights:
    """Return a client's rights; `least` limits those without a limit of their own."""
    if client.min_priority is not None:
        least = client.min_priority
    elif least is not None and client.priority is not None:
        least = min(least, client.priority)
    return Rights(max(0, least or 0) if client.priority is None else client.priority, least)


def priority_of(body: dict[str, Any], rights: Rights) -> int:
    """Return the priority of a request: a tier beyond the client's rights counts as none.

    Raises:
        Refusal: 400, for an unknown tier and for a number out of range or beyond those rights.
    """
    tier = body.get("service_tier")
    if tier is not None and not (isinstance(tier, str) and tier in TIERS):
        raise bad("service_tier", f"service_tier must be one of {', '.join(map(str, TIERS))}")
    if "priority" not in body:
        wanted = TIERS.get(tier)
        return wanted if wanted is not None and rights.may(wanted) else rights.priority
    try:
        priority = _PRIORITY.validate_python(body["priority"])
    except ValidationError:
        message = f"priority must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}: lower goes first"
        raise bad("priority", message) from None
    if not rights.may(priority):
        raise bad("priority", f"priority must be {rights.least} or more here: lower goes first")
    return priority
