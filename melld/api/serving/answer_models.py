"""vLLM's models of answers, made without a look for fields that they do not know.

vLLM logs such fields of requests from all of its models, in Python: of an answer, which it makes itself, the look takes
about as long as all the rest, for every model in every event.
"""

from collections.abc import Iterator
from typing import Any, get_args

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

_ANSWERS = (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    ResponsesResponse,
)
_LOOK = OpenAIBaseModel.__log_extra_fields__.__name__


def leave_unknown_fields() -> None:
    """Make the models of answers, and those inside them, check only the fields that they know."""
    models = dict.fromkeys(inner for model in _ANSWERS for inner in _models_in(model))
    looking = [one for one in models if one.__pydantic_decorators__.model_validators.pop(_LOOK, None) is not None]
    for model in looking:  # the inner ones first: their validators become part of the outer ones
        model.model_rebuild(force=True)


def _models_in(kind: Any) -> Iterator[Any]:
    """Yield the models in a type, and behind them itself if it is one."""
    if isinstance(kind, type) and issubclass(kind, OpenAIBaseModel):
        model: Any = kind
        for field in model.model_fields.values():
            yield from _models_in(field.annotation)
        yield model
    for inner in get_args(kind):
        yield from _models_in(inner)
