"""Every error that melld raises on purpose, as a type that carries facts.

`status` is the HTTP status of the answer when the error ends a client's request.
"""

from collections.abc import Sequence
from typing import ClassVar


class MelldError(Exception):
    """Base of all of melld's own errors."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    param: str | None = None
    """Name of the request's faulty field."""
    retry_after_s: float | None = None
    """Seconds after which a client may try again; answers with status 429 or 503 always have it."""
    should_retry: bool | None = None
    """False tells official clients not to repeat a harmful request (`x-should-retry`)."""


class ConfigError(MelldError):
    """The configuration is invalid; `where` is the file and key, or the flag."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


class UnknownWorker(MelldError):
    """There is no worker with that name."""

    status = 404
    code = "unknown_worker"

    def __init__(self, worker: str, known: Sequence[str]) -> None:
        super().__init__(f"no worker {worker!r}; available: {', '.join(known)}")


class UnknownModel(MelldError):
    """There is no model with that name."""

    status = 404
    code = "unknown_model"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        super().__init__(f"no model {model!r}; available: {', '.join(known)}")


class UnknownRequest(MelldError):
    """No running request matches the name, or several do."""

    status = 404
    code = "unknown_request"

    def __init__(self, request: str, alike: Sequence[str]) -> None:
        found = f"{len(alike)} requests match" if alike else "no request"
        super().__init__(f"{found} {request!r}{' (' + ', '.join(alike[:3]) + ')' if alike else ''}")


class RequestTooLarge(MelldError):
    """The request needs more KV memory than any worker can have."""

    status = 400
    code = "request_too_large"

    def __init__(self, request: str, kv_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"request {request} needs {kv_bytes} bytes of KV cache; a worker holds at most {capacity_bytes}"
        )
        self.kv_bytes = kv_bytes
        self.capacity_bytes = capacity_bytes


class InputTooLarge(MelldError):
    """The request with its decoded images is too large for a worker."""

    status = 413
    code = "input_too_large"

    def __init__(self, request: str, input_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"request {request} has {input_bytes} bytes with its images; at most {limit_bytes} are allowed"
        )


class TooManyPromptLogprobs(MelldError):
    """The call asks for more logprobs of its prompts than one answer may hold."""

    status = 400
    code = "too_many_prompt_logprobs"
    param = "prompt_logprobs"

    def __init__(self, asked: int, allowed: int) -> None:
        super().__init__(
            f"prompt tokens times logprobs is {asked}, but one call may have {allowed}: "
            "request fewer logprobs (prompt_logprobs, or logprobs with echo), or send the prompts in parts"
        )


class PromptRepeatedTooOften(MelldError):
    """A long prompt with many choices: each is a request with the whole prompt."""

    status = 400
    code = "prompt_repeated_too_often"
    param = "n"

    def __init__(self, tokens: int, choices: int, allowed: int) -> None:
        super().__init__(
            f"a prompt of {tokens} tokens with n = {choices} is {tokens * choices} tokens; "
            f"one call may have {allowed}: request fewer choices"
        )


class TooManyPromptLogprobsNow(MelldError):
    """Other calls hold all the prompt logprobs that may be in flight."""

    status = 429
    code = "too_many_prompt_logprobs_now"

    def __init__(self) -> None:
        super().__init__("too many prompt logprobs in flight: try again later")


class QueueFull(MelldError):
    """The queue is full, and no other client has more requests in it."""

    status = 429
    code = "queue_full"

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full with {waiting} requests: try again later")
        self.retry_after_s = retry_after_s


class WaitedTooLong(MelldError):
    """The request was not placed before the queue's deadline."""

    status = 503
    code = "waited_too_long"

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"no worker had room for the request in time ({waiting} others are waiting): try again later")
        self.retry_after_s = retry_after_s


class IllegalTransition(MelldError):
    """A lifecycle's table does not allow the step.  Nothing has changed."""

    def __init__(self, noun: str, name: str, state: str, event: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(f"{noun} {name} is {state}: cannot {event}" + "".join(f"\n  {line}" for line in story))


class InvalidSchema(MelldError):
    """A client's JSON schema is invalid, or cannot be compiled."""

    status = 400
    code = "invalid_json_schema"

    def __init__(self, why: str, param: str) -> None:
        super().__init__(f"invalid JSON schema: {why}")
        self.param = param


class TooManyValues(MelldError):
    """A request holds more objects and lists than the guards visit."""

    status = 400
    code = "too_many_values"

    def __init__(self, param: str, most: int) -> None:
        super().__init__(f"{param} is too large: messages, tools and schemas may contain {most} values in total")
        self.param = param


class ConstraintRefused(MelldError):
    """A constraint on the output (schema, regular expression, grammar, choice) cannot be used; `code` says why."""

    status = 400

    def __init__(self, why: str, code: str) -> None:
        super().__init__(f"the output constraint is invalid: {why}")
        self.code = code  # type: ignore[misc]


class NoTokenLeft(MelldError):
    """The request's own parameters forbid every token that could come next."""

    status = 400
    code = "invalid_value"

    def __init__(self, fields: Sequence[str], tokens: int) -> None:
        together = " and ".join(fields)
        super().__init__(f"{together} rule out every possible next token, after {tokens} output tokens")
        self.param = fields[0]


class UnusableToolCall(MelldError):
    """The model called a tool in a way that the API cannot express: neither the request nor melld is at fault."""

    status = 502
    code = "unusable_tool_call"

    def __init__(self, tool: str) -> None:
        super().__init__(f"the model called {tool} with arguments that are not a JSON object: try again")


class NoJudge(MelldError):
    """No process could check a constraint."""

    status = 503
    code = "no_judge"

    def __init__(self) -> None:
        super().__init__("output constraints cannot be compiled right now: try again later")
