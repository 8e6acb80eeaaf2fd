"""Errors as a client sees them: status, headers and JSON body in the dialect of the endpoint.

Pure.  `melld.api.error_mapping` decides which exception gets which answer.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from melld.errors import MelldError

JSON = "application/json"


class Dialect(Enum):
    """The API whose error bodies and event streams an endpoint uses."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Refusal(MelldError):
    """A request that ends in this answer; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.answer = Answer(status, message, code=code, param=param, headers=dict(headers or {}))

    @classmethod
    def of(cls, answer: "Answer") -> "Refusal":
        """Return the request that ends in this answer."""
        return cls(answer.status, answer.message, code=answer.code, param=answer.param, headers=answer.headers)


def bad(param: str, message: str) -> Refusal:
    """Return the refusal of a field's value."""
    return Refusal(400, message, code="invalid_value", param=param)


class Answer(msgspec.Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = {}

    def body(self, dialect: Dialect) -> bytes:
        """Return the JSON body of an HTTP answer."""
        return json.dumps(self._fields(dialect)).encode()

    def event(self, dialect: Dialect, sequence: int = 0) -> bytes:
        """Return the end of a started stream: an `error` event, numbered `sequence`, and the stream's end mark."""
        if dialect is Dialect.RESPONSES:
            fields: dict[str, Any] = {"type": "error", "code": self.code or openai_type(self.status)}
            fields |= {"message": self.message, "param": self.param, "sequence_number": sequence}
            return b"event: error\ndata: " + json.dumps(fields).encode() + b"\n\n"
        event = b"event: error\ndata: " + self.body(dialect) + b"\n\n"
        return event if dialect is Dialect.ANTHROPIC else event + b"data: [DONE]\n\n"

    def _fields(self, dialect: Dialect) -> dict[str, Any]:
        if dialect is Dialect.ANTHROPIC:
            return {"type": "error", "error": {"type": _anthropic_type(self.status), "message": self.message}}
        kind = openai_type(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def openai_type(status: int) -> str:
    """Return OpenAI's type of error for a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _anthropic_type(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
