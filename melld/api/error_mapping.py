"""Maps every exception that may end a request to one `Answer`.  Never sends and never logs.

Refusal, MelldError            their own status and code
ServingFault                   what vLLM's serving layer reported instead of raising it
pydantic's ValidationError     400, `param` from the place of the first error
vLLM's VLLMError and the bare  as vLLM's own exception handlers map them (vllm.entrypoints.serve.exception_handling)
ValueError family
aiohttp's, TimeoutError        502: what vLLM's fetch of media by URL ends in, if another try may succeed
anything else                  500, without its message
"""

import re
from typing import Any

import aiohttp
from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import GenerationError, VLLMError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from melld.api.answers import Answer, Refusal
from melld.api.parsing import NOT_LOOKED_AT
from melld.errors import ConstraintRefused, MelldError, RequestTooLarge, TooManyPromptLogprobs

RETRY_AFTER_S = 1
MAX_REPORTED_ERRORS = 5
MAX_MESSAGE_CHARACTERS = 2000
NOT_FETCHED = (aiohttp.ClientError, TimeoutError)
_PROMPTS = ("messages", "prompt", "input")
"""The fields that may make a request too large."""
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "tools")
"""The fields that constrain the output."""
_LIMITS = ("allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "stop_token_ids")
"""The fields that may forbid every token that would continue a constrained output."""


class ServingFault(Exception):
    """An error that vLLM's serving layer reports as a response or as a piece of a stream."""

    def __init__(self, reported: ErrorResponse | Exception) -> None:
        super().__init__(str(reported))
        self.reported = reported


def answer_to(error: BaseException, parameters: frozenset[str] = frozenset()) -> Answer:
    """Return the answer to a request that ended in `error`; `param` may be guessed from the names in `parameters`."""
    if isinstance(error, Refusal):
        return error.answer
    if _is_dead_end(error) and (conflict := _dead_end(parameters)) is not None:
        return conflict
    if isinstance(error, ServingFault):
        if isinstance(error.reported, ErrorResponse):
            return answer_in(error.reported, parameters)
        return answer_to(error.reported, parameters)
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, MelldError):
        error = error.__cause__
    if isinstance(error, MelldError):
        return _answer_to_our_own(error, parameters)
    if isinstance(error, ValidationError):
        return _answer_to_validation(error)
    if isinstance(error, EngineDeadError):
        message = "no worker can serve this request right now"
        return Answer(503, message, code="no_worker", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, NOT_FETCHED):
        why = str(error)[:MAX_MESSAGE_CHARACTERS] or "it took too long"
        param = next((name for name in _PROMPTS if name in parameters), None)
        return Answer(502, f"media in the request could not be fetched: {why}", code="media_not_fetched", param=param)
    if is_known(error):
        return answer_in(create_error_response(error), parameters)
    return Answer(500, "Internal server error", code="internal_error")


def needs_traceback(error: BaseException, answer: Answer) -> bool:
    """Return True if the error must be logged: it is the server's fault and has not been logged yet."""
    if isinstance(error, EngineGenerateError) and error.__cause__ is not None:
        error = error.__cause__
    if answer.status < 500 or isinstance(error, MelldError):
        return False
    return answer.status == 500 or not is_known(error)


def is_known(error: BaseException) -> bool:
    """Return True if the error is raised on purpose; any other is a bug, to be logged with its traceback."""
    if isinstance(error, ServingFault):
        return isinstance(error.reported, ErrorResponse) or is_known(error.reported)
    if isinstance(error, EngineGenerateError):
        return isinstance(error.__cause__, MelldError)
    on_purpose = (MelldError, VLLMError, ValueError, TypeError, OverflowError, NotImplementedError, *NOT_FETCHED)
    return isinstance(error, on_purpose) or any(c.__name__ == "TemplateError" for c in type(error).__mro__)


def _is_dead_end(error: BaseException) -> bool:
    """Return True if a worker ended the request because no allowed token was left, for which vLLM gives no reason."""
    found: object = error.reported if isinstance(error, ServingFault) else error
    if isinstance(found, ErrorResponse):
        return bool(found.error.code == 500 and found.error.message == str(GenerationError()))
    return type(found) is GenerationError


def _dead_end(parameters: frozenset[str]) -> Answer | None:
    structure = next((name for name in _CONSTRAINTS if name in parameters), None)
    limit = next((name for name in _LIMITS if name in parameters), None)
    if structure is None or limit is None:
        return None
    return Answer(
        400, f"{limit} leaves no token with which {structure} could continue", code="invalid_value", param=limit
    )


def answer_in(response: ErrorResponse, parameters: frozenset[str] = frozenset()) -> Answer:
    """Return the answer for one of vLLM's ErrorResponses."""
    error = response.error
    message = error.message[:MAX_MESSAGE_CHARACTERS]
    code, param = None, error.param
    if error.code == 404 and param == "model":
        code = "model_not_found"
    elif error.code == 400:
        code, param = _finer(message, param, parameters)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.code in (429, 503) else {}
    return Answer(error.code, message, code=code, param=param, headers=headers)


def _answer_to_our_own(error: MelldError, parameters: frozenset[str]) -> Answer:
    param = error.param
    if param is None and isinstance(error, RequestTooLarge):
        param = next((name for name in _PROMPTS if name in parameters), None)
    if isinstance(error, TooManyPromptLogprobs) and param not in parameters:
        param = "logprobs"  # `logprobs` together with `echo`
    if param is None and isinstance(error, ConstraintRefused):
        param = next((name for name in _CONSTRAINTS if name in parameters), None)
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s or RETRY_AFTER_S)))
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    return Answer(error.status, str(error), code=error.code, param=param, headers=headers)


def _answer_to_validation(error: ValidationError) -> Answer:
    """Answer as vLLM's handler of a RequestValidationError does, but in one line of bounded length."""
    errors = [one for one in error.errors(include_url=False, include_input=False) if one["type"] != NOT_LOOKED_AT]
    if errors and isinstance((*errors[0]["loc"], None)[0], int):  # vLLM has validated the entries individually
        return Answer(400, _said_of_entry(errors), param="messages")
    param = None
    for one in errors:
        cause = one.get("ctx", {}).get("error")
        if isinstance(cause, VLLMValidationError) and cause.parameter is not None:
            param = cause.parameter
            break
    lines = []
    for one in errors[:MAX_REPORTED_ERRORS]:
        place = clean_loc_for_param(one["loc"]) if one["loc"] else ""
        param = param or place or None
        lines.append(f"{place}: {one['msg']}" if place else one["msg"])
    if len(errors) > MAX_REPORTED_ERRORS:
        lines.append(f"and {len(errors) - MAX_REPORTED_ERRORS} more")
    return Answer(400, "; ".join(lines)[:MAX_MESSAGE_CHARACTERS], param=param)


def _said_of_entry(errors: list[Any]) -> str:
    """Say what is wrong with a message's part or tool call, after pydantic tried it as every possible type."""
    not_meant = [one for one in errors if one["type"] == "literal_error" and one["loc"][2:] == ("type",)]
    others = {one["loc"][:2] for one in not_meant}
    meant = [one for one in errors if one["loc"][:2] not in others]
    if not meant:
        types = ", ".join(one["ctx"]["expected"] for one in not_meant)
        return f"entry {errors[0]['loc'][0]} has an unknown type: use one of {types}"
    lines = []
    for one in meant:
        number, *place = [part for part in map(str, one["loc"]) if not part[:1].isupper()]  # without the type's class
        lines.append(": ".join([f"entry {number}", *filter(None, [".".join(place)]), one["msg"]]))
    return "; ".join(list(dict.fromkeys(lines))[:MAX_REPORTED_ERRORS])[:MAX_MESSAGE_CHARACTERS]


# vLLM's text -> the code, and the fields that may be at fault.
_FINER = (
    (re.compile("maximum (context|model) length"), "context_length_exceeded", _PROMPTS),
    (re.compile("a media URL leads"), "internal_media_url", ("messages", "input", "prompt")),
    (re.compile("media in the request cannot be decoded"), "media_not_decoded", ("messages", "input", "prompt")),
    (re.compile("not a multimodal model"), None, ("messages", "input", "prompt")),
    (re.compile("at least one prompt|prompt cannot be empty|empty conversation"), None, ("prompt", "input")),
    (re.compile(r"Token id \d+ is out of vocab"), None, ("prompt", "input", "messages", "tokens")),
    (re.compile(r"(?i)grammar|json.schema|structural.tag|regex"), "invalid_grammar", _CONSTRAINTS),
)


def _finer(message: str, param: str | None, parameters: frozenset[str]) -> tuple[str | None, str | None]:
    """Return the error code and field of a bad request, as far as its text names them."""
    if param == "logprobs" and "top_logprobs" in parameters:
        return None, "top_logprobs"
    for pattern, code, fields in _FINER:
        if pattern.search(message):
            return code, next((name for name in fields if name in parameters), param)
    return None, param or _parameter_named_in(message, parameters)


def _parameter_named_in(message: str, parameters: frozenset[str]) -> str | None:
    """Return the field that starts the message, else the first one that is not an English word."""
    words = re.findall(r"[a-z_]+", message)
    return next((w for i, w in enumerate(words) if w in parameters and (i == 0 or "_" in w)), None)
