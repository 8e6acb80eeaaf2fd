"""Models of answers are made without vLLM's look for unknown fields."""

import logging

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbsContent, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

from melld.api.serving.fit import leave_unknown_fields
from melld.api.serving.requests import ChatCompletionRequest

MESSAGE = {"role": "assistant", "content": "Hello", "kept": 1}
ANSWER = {
    "id": "1",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE}],
    "usage": {"prompt_tokens": 1},
    "more": [2],
}


class Fresh(ChatCompletionResponse):
    """As vLLM defines it: the processes of the tests begin with the others' looks taken away."""


LOG = "vllm.entrypoints.serve.engine.protocol"


def test_only_requests_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's log of a request's unknown fields stays; its answers, whatever they hold, stay as they are."""
    assert issubclass(Fresh, OpenAIBaseModel)
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, LOG):
            before = Fresh.model_validate(ANSWER).model_dump_json()
            assert caplog.records
            caplog.clear()
            leave_unknown_fields()
            leave_unknown_fields()
            after = Fresh.model_validate(ANSWER)
            ChatCompletionLogProbsContent.model_validate({"token": "a", "unknown": 1})  # a model of a model
            assert (after.model_dump_json(), caplog.records) == (before, [])
            ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "unknown": 1})
            assert {record.levelname for record in caplog.records} == {"DEBUG"}
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
