"""Parsers that report what clients expect: call ids, one piece per call in an event, and reasoning under both names."""

from typing import Any

from vllm.utils import random_uuid

VLLM_CALL = "chatcmpl-tool-"


def telling(parser: type | None, call_prefix: str, *, tells_twice: bool = False) -> type | None:
    """Return a parser class whose call ids have this prefix; `tells_twice`: reasoning goes under both names.

    An id in a form that the model demands (Kimi K2, Mistral) stays.
    """
    if parser is None:
        return None

    class Telling(parser):  # type: ignore[misc, valid-type]  # vLLM is not checked: its classes are Any
        telling_of = parser
        """The wrapped parser; text without reasoning or calls is returned as that left it."""

        def parse(self, *arguments: Any, **named: Any) -> Any:
            thought, text, calls = super().parse(*arguments, **named)
            for call in calls or ():
                call.id = _call_id(call.id or f"{VLLM_CALL}{random_uuid()}", call_prefix)
            return thought, text, calls

        def parse_delta(self, *arguments: Any, **named: Any) -> Any:
            delta = super().parse_delta(*arguments, **named)
            if delta is not None:
                if delta.tool_calls:
                    delta.tool_calls = joined(delta.tool_calls)
                for call in delta.tool_calls:
                    if call.id:
                        call.id = _call_id(call.id, call_prefix)
                if tells_twice:
                    tell_twice(delta)
            return delta

    Telling.__name__ = parser.__name__
    return Telling


def joined(pieces: list[Any]) -> list[Any]:
    """Merge the pieces of each call into one: clients read only the first piece in an event.

    vLLM's parsers split a call's name and first arguments into two pieces, even if both come in one step.
    """
    calls: dict[int, Any] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, piece)
        if call is not piece and piece.function is not None:
            call.function.arguments = (call.function.arguments or "") + (piece.function.arguments or "")
    return list(calls.values())


def tell_twice(message: Any) -> None:
    """Set the reasoning under both names: that of vLLM and OpenRouter, and the one that most chat clients read."""
    if message.reasoning is not None:
        message.reasoning_content = message.reasoning


def _call_id(call_id: str, prefix: str) -> str:
    return prefix + call_id.removeprefix(VLLM_CALL) if call_id.startswith(VLLM_CALL) else call_id
