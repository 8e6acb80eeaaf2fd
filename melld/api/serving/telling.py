"""Parsers that tell what clients look for: ids of calls, a call once per event, and thoughts under both their names."""

from typing import Any

from vllm.utils import random_uuid

VLLM_CALL = "chatcmpl-tool-"


def telling(parser: type | None, call_prefix: str, *, tells_twice: bool = False) -> type | None:
    """Return a parser's class whose calls have ids with this prefix; `tells_twice`: thoughts under both names.

    An id in a form that the model demands, as Kimi K2's and Mistral's, stays.
    """
    if parser is None:
        return None

    class Telling(parser):  # type: ignore[misc, valid-type]  # vLLM is not checked: its classes are Any
        telling_of = parser
        """Whose words it tells: text that is nothing else is left as it is."""

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
    """Return the pieces of calls with one for each call: clients read an event's first piece and no other.

    vLLM's parsers tell a call's name and its first arguments as two, where both come in one step.
    """
    calls: dict[int, Any] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, piece)
        if call is not piece and piece.function is not None:
            call.function.arguments = (call.function.arguments or "") + (piece.function.arguments or "")
    return list(calls.values())


def tell_twice(message: Any) -> None:
    """Tell a thought under both names: vLLM's and OpenRouter's, and the one that most clients of chats read."""
    if message.reasoning is not None:
        message.reasoning_content = message.reasoning


def _call_id(call_id: str, prefix: str) -> str:
    return prefix + call_id.removeprefix(VLLM_CALL) if call_id.startswith(VLLM_CALL) else call_id
