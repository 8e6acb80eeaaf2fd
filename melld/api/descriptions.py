"""What the OpenAPI document says of each route: its summary, and the models of what it takes and gives.

Pure.  `melld.api.openapi` makes the document of it.
"""

from typing import Any, NamedTuple

import msgspec
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest, ClassificationResponse
from vllm.entrypoints.pooling.embed.protocol import (
    CohereEmbedRequest,
    CohereEmbedResponse,
    EmbeddingRequest,
    EmbeddingResponse,
)
from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest, PoolingResponse
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.speech_to_text.transcription.protocol import (
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionResponseVerbose,
)
from vllm.entrypoints.speech_to_text.translation.protocol import (
    TranslationRequest,
    TranslationResponse,
    TranslationResponseVerbose,
)

from melld.api.stored_responses import ASKED
from melld.control.status import DaemonStatus


class Problem(msgspec.Struct, frozen=True):
    """An error in OpenAI's form."""

    message: str
    """Text for people."""
    type: str
    """OpenAI's type of error."""
    param: str | None
    """The field at fault."""
    code: str | None
    """Code for programs."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or more, except on Anthropic's endpoints."""

    error: Problem


class AnthropicProblem(msgspec.Struct, frozen=True):
    """An error in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """The body of an error on Anthropic's endpoints."""

    type: str
    error: AnthropicProblem


class Health(msgspec.Struct, frozen=True):
    """Sign that the daemon's event loop runs."""

    status: str


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer of `/ready`: requests are served, or why not."""

    status: str
    reason: str = ""


class Deleted(msgspec.Struct, frozen=True):
    """A deleted response."""

    id: str
    object: str
    deleted: bool


class Versions(msgspec.Struct, frozen=True):
    """Versions of melld and vLLM."""

    version: str
    vllm: str


class Described(NamedTuple):
    """A call's models.  If `streams`, `"stream": true` makes the answer a stream of server-sent events."""

    takes: Any
    gives: Any
    summary: str
    streams: bool = False


_SCORE = Described(ScoreRequest, ScoreResponse, "Score pairs of texts, with a model that scores or embeds")
_RERANK = Described(RerankRequest, RerankResponse, "Sort texts by their relevance (Cohere's and Jina's form)")
CALLED: dict[str, Described] = {
    "/v1/chat/completions": Described(
        ChatCompletionRequest, ChatCompletionResponse, "Answer a conversation (OpenAI Chat Completions)", True
    ),
    "/v1/completions": Described(CompletionRequest, CompletionResponse, "Continue a text (OpenAI Completions)", True),
    "/v1/responses": Described(ResponsesRequest, ResponsesResponse, "Answer (OpenAI Responses)", True),
    "/v1/messages": Described(
        AnthropicMessagesRequest, AnthropicMessagesResponse, "Answer a conversation (Anthropic Messages)", True
    ),
    "/v1/messages/count_tokens": Described(
        AnthropicCountTokensRequest, AnthropicCountTokensResponse, "Count a conversation's tokens (Anthropic)"
    ),
    "/v1/embeddings": Described(EmbeddingRequest, EmbeddingResponse, "Embed texts, with an embedding model"),
    "/v2/embed": Described(CohereEmbedRequest, CohereEmbedResponse, "Embed texts (Cohere's form)"),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/classify": Described(
        ClassificationRequest, ClassificationResponse, "Classify texts, with a classification model"
    ),
    "/pooling": Described(PoolingRequest, PoolingResponse, "A pooling model's vectors: of texts, or of their tokens"),
    "/v1/audio/transcriptions": Described(
        TranscriptionRequest, TranscriptionResponse | TranscriptionResponseVerbose, "Write down what is said", True
    ),
    "/v1/audio/translations": Described(
        TranslationRequest,
        TranslationResponse | TranslationResponseVerbose,
        "Write down what is said, in English",
        True,
    ),
    "/tokenize": Described(TokenizeChatRequest | TokenizeCompletionRequest, TokenizeResponse, "Text into tokens"),
    "/detokenize": Described(DetokenizeRequest, DetokenizeResponse, "Tokens into text"),
}


class Looked(NamedTuple):
    """A page's answer: a model, or only a media type."""

    gives: Any
    summary: str
    media_type: str = "application/json"
    open: bool = False
    """Served without a key."""


LOOKED: dict[str, Looked] = {
    "/": Looked(None, "The page for people, which shows /status live", "text/html", open=True),
    "/health": Looked(Health, "Liveness: the daemon's event loop runs", open=True),
    "/ready": Looked(Readiness, "Readiness: 503 with the reason while no request is served", open=True),
    "/version": Looked(Versions, "Versions of melld and of vLLM"),
    "/metrics": Looked(None, "Metrics in Prometheus' text format", "text/plain"),
    "/status": Looked(DaemonStatus, "Workers and requests now"),
    "/openapi.json": Looked(None, "This document"),
    "/v1/models": Looked(ModelList, "The models that are served"),
    "/v1/models/{model}": Looked(ModelCard, "One model"),
}

_STORED, _CANCEL = ASKED
STORED: dict[tuple[str, str], Looked] = {
    (_STORED, "get"): Looked(ResponsesResponse, "A stored response, complete or still being made"),
    (_STORED, "delete"): Looked(Deleted, "Forget a stored response, and end the work for it"),
    (_CANCEL, "post"): Looked(ResponsesResponse, "End the work for a response in the background"),
}
