"""What melld's tier names assume about vLLM: a version that names tiers itself fails here."""

import inspect
import warnings


def test_vllm_s_answers_match_our_assumptions() -> None:
    """A field of the same name in a chunk would appear twice; the Responses API repeats the request's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports give several
        from vllm.entrypoints.anthropic.protocol import AnthropicUsage
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
        from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse
        from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

    for lacking in (ChatCompletionStreamResponse, CompletionStreamResponse, AnthropicUsage):
        assert "service_tier" not in lacking.model_fields, lacking
    assert "service_tier=request.service_tier" in inspect.getsource(ResponsesResponse)
    converter = inspect.getsource(AnthropicServingMessages)
    assert 'wrap_data_with_event(data, "message_start")' in converter
