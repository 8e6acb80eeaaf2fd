"""Reranking as Cohere's older clients ask for it: documents as objects with a text."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.pooling.scoring.typing import ScoreInput


class TextDocument(BaseModel):
    """A document in Cohere's older form."""

    text: str


def _texts(documents: Any) -> Any:
    """Return the documents with the bare texts of those that are objects with one."""
    if isinstance(documents, list):
        return list(map(_texts, documents))
    if isinstance(documents, dict) and isinstance(documents.get("text"), str) and "content" not in documents:
        return documents["text"]
    return documents


_Document = ScoreInput | TextDocument


class Rerank(RerankRequest):  # type: ignore[misc]
    """vLLM's request, and what else those clients send."""

    documents: Annotated[
        ScoreInput | list[ScoreInput], BeforeValidator(_texts, json_schema_input_type=_Document | list[_Document])
    ]
