"""Reranking as Cohere's and Jina's clients expect it: documents may be objects, and answers may omit them."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator
from starlette.responses import JSONResponse
from vllm.entrypoints.pooling.scoring.protocol import RerankDocument, RerankRequest, RerankResponse, RerankResult
from vllm.entrypoints.pooling.scoring.serving import ServingScores
from vllm.entrypoints.pooling.scoring.typing import ScoreInput


class TextDocument(BaseModel):
    """A document in Cohere's older form."""

    text: str


def _texts(documents: Any) -> Any:
    """Return the documents, with each object that has a text replaced by it."""
    if isinstance(documents, list):
        return list(map(_texts, documents))
    if isinstance(documents, dict) and isinstance(documents.get("text"), str) and "content" not in documents:
        return documents["text"]
    return documents


_Document = ScoreInput | TextDocument


class Rerank(RerankRequest):  # type: ignore[misc]
    """vLLM's request, with the other fields that those clients send."""

    documents: Annotated[
        ScoreInput | list[ScoreInput], BeforeValidator(_texts, json_schema_input_type=_Document | list[_Document])
    ]
    return_documents: bool = True


class Ranked(RerankResult):  # type: ignore[misc]
    """A result; it lacks its document if the client wants none."""

    document: RerankDocument | None = None


class RerankAnswer(RerankResponse):  # type: ignore[misc]
    """vLLM's answer, with such results."""

    results: list[Ranked]


class Scores(ServingScores):  # type: ignore[misc]
    """vLLM's class, which returns every document."""

    def _build_response(self, ctx: Any) -> Any:
        if not isinstance(ctx.request, Rerank) or ctx.request.return_documents:
            return super()._build_response(ctx)
        ctx.request.documents = [""] * len(ctx.final_res_batch)
        answer = json.loads(super()._build_response(ctx).body)
        for result in answer["results"]:
            del result["document"]
        return JSONResponse(answer)
