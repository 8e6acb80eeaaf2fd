"""Puts this API's subclasses in place of vLLM's serving classes."""

from starlette.datastructures import State

from melld.api.serving.chats import Chats
from melld.api.serving.completions import Completions, WithoutReasoning
from melld.api.serving.messages import Messages
from melld.api.serving.responses import Responses

_KINDS = {
    "openai_serving_chat": Chats,
    "openai_serving_completion": Completions,
    "openai_serving_responses": Responses,
    "anthropic_serving_messages": Messages,
}


def fit_classes(serving: State) -> None:
    """Have a model's serving classes do what this API promises, once.  vLLM makes them all in one go."""
    for name, kind in _KINDS.items():
        handler = getattr(serving, name, None)
        if handler is not None:
            handler.__class__ = kind
    if (completions := getattr(serving, "openai_serving_completion", None)) is not None:
        completions.engine_client = WithoutReasoning(completions.engine_client)
