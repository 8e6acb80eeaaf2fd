"""What all streaming serving classes do differently: they raise errors, and show their parsers to the outlets."""

from http import HTTPStatus
from typing import Any, Never

from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation

from melld.api.error_mapping import ServingFault
from melld.engine.frontend.caller import caller


class Streaming:
    """A mix-in for vLLM's classes; list it before them."""

    def create_streaming_error_response(
        self,
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> Never:
        """Raise the error that vLLM would write into the stream; all of them pass through here.

        Raises:
            ServingFault: always.
        """
        if isinstance(message, Exception):
            raise ServingFault(message) from message
        raise ServingFault(create_error_response(message, err_type, status_code, param))

    def _make_parser(self, *arguments: Any, **named: Any) -> Any:
        return _shown(super()._make_parser(*arguments, **named))  # type: ignore[misc]

    def _make_response_parser(self, *arguments: Any, **named: Any) -> Any:
        return _shown(super()._make_response_parser(*arguments, **named))  # type: ignore[misc]


class Transcriptions(Streaming, OpenAIServingTranscription):  # type: ignore[misc]  # vLLM's classes are Any
    """vLLM's class."""


class Translations(Streaming, OpenAIServingTranslation):  # type: ignore[misc]
    """vLLM's class."""


def _shown(parser: Any) -> Any:
    """Return the parser of a call, after its outlet has seen it."""
    if parser is not None and (outlet := caller().outlet) is not None:
        outlet.watch(parser)
    return parser
