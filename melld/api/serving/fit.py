"""Replaces vLLM's serving classes with this API's subclasses, and functions that they call with its own."""

import logging

from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.renderers.online_renderer import OnlineRenderer

from melld.api.serving.chats import Chats
from melld.api.serving.completions import WithoutReasoning
from melld.api.serving.lengths import tell_lengths
from melld.api.serving.many_texts import serve_many_texts
from melld.api.serving.messages import Messages
from melld.api.serving.rerank import Scores
from melld.api.serving.responses import Responses
from melld.api.serving.roles import Renderer
from melld.api.serving.short_prompts import at_once
from melld.api.serving.streaming import Streaming, Transcriptions, Translations
from melld.api.serving.telling import telling
from melld.api.serving.usage import CountedCompletions

_KINDS = {
    "openai_serving_chat": Chats,
    "openai_serving_completion": CountedCompletions,
    "openai_serving_responses": Responses,
    "anthropic_serving_messages": Messages,
    "openai_serving_transcription": Transcriptions,
    "openai_serving_translation": Translations,
    "serving_scores": Scores,
}
_PARSERS = (
    ("openai_serving_chat", "parser_cls", "call_"),
    ("openai_serving_responses", "parser", "call_"),
    ("anthropic_serving_messages", "parser_cls", "toolu_"),
)
"""Where each class keeps its parser, and the prefix of the ids of its tool calls."""


def fit_classes(serving: State) -> None:
    """Make a model's serving classes do what this API promises.  Call once; vLLM creates them all together."""
    for name, kind in _KINDS.items():
        handler = getattr(serving, name, None)
        if handler is not None:
            if issubclass(kind, Streaming):  # its errors are raised and answered, so vLLM need not log them
                logging.getLogger(type(handler).__module__).setLevel(logging.CRITICAL)
            handler.__class__ = kind
            if type(renderer := getattr(handler, "online_renderer", None)) is OnlineRenderer:
                renderer.__class__ = Renderer
    for name, attribute, call_prefix in _PARSERS:
        if (handler := getattr(serving, name, None)) is not None:
            told = telling(getattr(handler, attribute), call_prefix, tells_twice=isinstance(handler, Chats))
            setattr(handler, attribute, told)
    if (completions := getattr(serving, "openai_serving_completion", None)) is not None:
        completions.engine_client = WithoutReasoning(completions.engine_client)
    renderer = completions.renderer if completions is not None else None
    if renderer is not None and not getattr(serving.args, "trust_request_chat_template", False):
        renderer.__class__ = at_once(type(renderer))  # a client's template may loop forever
    tell_lengths()
    leave_unknown_fields()
    serve_many_texts(serving)


def leave_unknown_fields() -> None:
    """Make vLLM's models of answers look for no fields that they do not know, as those of requests do to log them.

    In Python, for every model in every event, the look takes as long as all the rest.
    """
    look = OpenAIBaseModel.__log_extra_fields__.__name__
    models = OpenAIBaseModel.__subclasses__()
    for at, model in enumerate(models):  # the inner ones first: they become part of the outer ones
        models[at + 1 : at + 1] = model.__subclasses__()
        looks = model.__pydantic_decorators__.model_validators
        if "Request" not in model.__name__ and looks.pop(look, None) is not None:
            model.model_rebuild(force=True)
