"""Calls: a table of the endpoints served by vLLM's serving classes, with their request and response models.

Pure.  `melld.api.performing` passes a call to those classes; `melld.api.openapi` describes it.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.classify import protocol as classify
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.tokenize import protocol as tokenize
from vllm.entrypoints.speech_to_text.transcription import protocol as transcription
from vllm.entrypoints.speech_to_text.translation import protocol as translation

from melld.api.answers import Dialect
from melld.api.parsing import patient, trying
from melld.api.serving.requests import ChatCompletionRequest, ResponsesRequest
from melld.api.serving.rerank import Rerank, RerankAnswer
from melld.config_server import ServerConfig

_TOKENIZE_CHAT, _TOKENIZE_TEXT = patient(tokenize.TokenizeChatRequest), patient(tokenize.TokenizeCompletionRequest)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint."""

    summary: str
    takes: Any
    """vLLM's pydantic model of its body, or a union of several."""
    gives: Any
    """vLLM's model of its response, unless that is a stream."""
    parse: Callable[[dict[str, Any]], BaseModel]
    """Parses a body into that model."""
    serving: str
    """The attribute of vLLM's serving state."""
    method: str = ""
    """The method that serves it; empty if the object itself is called."""
    api: str
    """The API's name, for errors."""
    dialect: Dialect = Dialect.OPENAI
    engine: bool = True
    """True if a worker computes it."""
    dump: dict[str, Any] = {}
    """Arguments of `model_dump_json` for the response."""
    max_body_bytes: int = sys.maxsize
    """A limit below the configured one, for an answer that grows with the body and is built all at once."""
    hears: bool = False
    """True if the body is a form with audio, not JSON."""

    @property
    def streams(self) -> bool:
        """Return True if it can answer with a stream of events, on request."""
        return "stream" in getattr(self.takes, "model_fields", ())

    def limits(self, config: ServerConfig) -> ServerConfig:
        """Return the limits of this endpoint's bodies."""
        most = config.max_audio_bytes if self.hears else min(config.max_body_bytes, self.max_body_bytes)
        return msgspec.structs.replace(config, max_body_bytes=most)


def _of(takes: type[BaseModel], gives: Any, summary: str, **more: Any) -> Call:
    """Return a call that takes one model."""
    return Call(summary=summary, takes=takes, gives=gives, parse=patient(takes), **more)


def _pooling(takes: Any, gives: Any, summary: str, plain: Any = None, **more: Any) -> Call:
    """Return a call that takes any of several models; `plain`: see `trying`."""
    return Call(summary=summary, takes=takes, gives=gives, parse=trying(takes, plain), **more)


def _tokenize(body: dict[str, Any]) -> BaseModel:
    return _TOKENIZE_CHAT(body) if "messages" in body else _TOKENIZE_TEXT(body)


_SCORE = _pooling(
    scoring.ScoreRequest,
    scoring.ScoreResponse,
    "Score pairs of texts with a scoring or embedding model",
    serving="serving_scores",
    api="Score",
)
_RERANK = _pooling(
    Rerank,
    RerankAnswer,
    "Rank texts by relevance (Cohere and Jina format)",
    serving="serving_scores",
    api="Rerank",
)
POOLING = frozenset({"serving_embedding", "serving_scores", "serving_classification", "serving_pooling"})
"""The serving attributes of models that generate no text."""
CALLS = {
    "/v1/chat/completions": _of(
        ChatCompletionRequest,
        chat.ChatCompletionResponse,
        "Chat completion (OpenAI)",
        serving="openai_serving_chat",
        method="create_chat_completion",
        api="Chat Completions",
    ),
    "/v1/completions": _of(
        completion.CompletionRequest,
        completion.CompletionResponse,
        "Text completion (OpenAI)",
        serving="openai_serving_completion",
        method="create_completion",
        api="Completions",
    ),
    "/v1/responses": _of(
        ResponsesRequest,
        responses.ResponsesResponse,
        "Create a response (OpenAI)",
        serving="openai_serving_responses",
        method="create_responses",
        api="Responses",
        dialect=Dialect.RESPONSES,
        dump={"by_alias": True},
    ),
    "/v1/messages": _of(
        anthropic.AnthropicMessagesRequest,
        anthropic.AnthropicMessagesResponse,
        "Create a message (Anthropic)",
        serving="anthropic_serving_messages",
        method="create_messages",
        api="Messages",
        dialect=Dialect.ANTHROPIC,
        dump={"exclude_none": True, "serialize_as_any": True},  # its usage has more fields than vLLM's
    ),
    "/v1/messages/count_tokens": _of(
        anthropic.AnthropicCountTokensRequest,
        anthropic.AnthropicCountTokensResponse,
        "Count the tokens of a message (Anthropic)",
        serving="anthropic_serving_messages",
        method="count_tokens",
        engine=False,
        api="Messages",
        dialect=Dialect.ANTHROPIC,
        dump={"exclude_none": True},
    ),
    "/v1/embeddings": _pooling(
        embed.EmbeddingRequest,
        embed.EmbeddingResponse,
        "Embed texts with an embedding model",
        plain=embed.EmbeddingCompletionRequest,
        serving="serving_embedding",
        api="Embeddings",
    ),
    "/v2/embed": _pooling(
        embed.CohereEmbedRequest,
        embed.CohereEmbedResponse,
        "Embed texts (Cohere format)",
        serving="serving_embedding",
        api="Embeddings",
    ),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/classify": _pooling(
        classify.ClassificationRequest,
        classify.ClassificationResponse,
        "Classify texts with a classification model",
        plain=classify.ClassificationCompletionRequest,
        serving="serving_classification",
        api="Classification",
    ),
    "/pooling": _pooling(
        pooling.PoolingRequest,
        pooling.PoolingResponse,
        "Pool texts or their tokens into vectors with a pooling model",
        plain=pooling.PoolingCompletionRequest,
        serving="serving_pooling",
        api="Pooling",
    ),
    "/v1/audio/transcriptions": _of(
        transcription.TranscriptionRequest,
        transcription.TranscriptionResponse | transcription.TranscriptionResponseVerbose,
        "Transcribe speech",
        serving="openai_serving_transcription",
        method="create_transcription",
        api="Transcriptions",
        hears=True,
    ),
    "/v1/audio/translations": _of(
        translation.TranslationRequest,
        translation.TranslationResponse | translation.TranslationResponseVerbose,
        "Translate speech into English text",
        serving="openai_serving_translation",
        method="create_translation",
        api="Translations",
        hears=True,
    ),
    "/tokenize": Call(
        summary="Convert text to tokens",
        takes=tokenize.TokenizeChatRequest | tokenize.TokenizeCompletionRequest,
        gives=tokenize.TokenizeResponse,
        parse=_tokenize,
        serving="serving_tokenization",
        method="create_tokenize",
        engine=False,
        api="Tokenize",
        max_body_bytes=1 << 20,
    ),
    "/detokenize": _of(
        tokenize.DetokenizeRequest,
        tokenize.DetokenizeResponse,
        "Convert tokens to text",
        serving="serving_tokenization",
        method="create_detokenize",
        engine=False,
        api="Detokenize",
        max_body_bytes=1 << 19,
    ),
}
