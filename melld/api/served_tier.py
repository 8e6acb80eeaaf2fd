"""Names the tier that served a request in its answer, as OpenAI's and Anthropic's services do.

vLLM's whole answers have the field, and leave it empty; its chunks of streams and its usage of a message lack it.  Its
Responses API repeats the request's, which is set before the request is parsed.
"""

import json

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse, AnthropicUsage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse

from melld.api.answers import Dialect
from melld.scheduler.priorities import Tier

_OF_ANTHROPIC = {Tier.PRIORITY: "priority", Tier.DEFAULT: "standard", Tier.FLEX: "batch"}
_CHUNK, _MESSAGE = "data: {", "event: message_start\ndata: "


class TieredUsage(AnthropicUsage):  # type: ignore[misc]
    """A message's usage with its tier."""

    service_tier: str


def name_in_body(answer: BaseModel, tier: Tier) -> None:
    """Name the tier in a whole answer, where its API has a field for it."""
    if isinstance(answer, ChatCompletionResponse | CompletionResponse):
        answer.service_tier = tier.value
    elif isinstance(answer, AnthropicMessagesResponse):
        answer.usage = TieredUsage(**dict(answer.usage or ()), service_tier=_OF_ANTHROPIC[tier])


def name_in_event(event: str, dialect: Dialect, tier: Tier) -> str:
    """Return a stream's event with the tier: every chunk of OpenAI's, the first event of Anthropic's."""
    if dialect is Dialect.OPENAI and event.startswith(_CHUNK):
        return f'{_CHUNK}"service_tier":"{tier.value}",{event[len(_CHUNK) :]}'
    if dialect is Dialect.ANTHROPIC and event.startswith(_MESSAGE):
        said = json.loads(event.removeprefix(_MESSAGE))
        said["message"]["usage"]["service_tier"] = _OF_ANTHROPIC[tier]
        return f"{_MESSAGE}{json.dumps(said)}\n\n"
    return event
