"""Chat completions whose log-probabilities tell the bytes of every token."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from melld.engine.frontend.token_texts import true_bytes


class Chats(OpenAIServingChat):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, but for parts of characters."""

    def _create_chat_logprobs(self, **arguments: Any) -> ChatCompletionLogProbs:
        made = super()._create_chat_logprobs(**arguments)
        for entry in made.content or ():
            for one in (entry, *entry.top_logprobs):
                one.bytes = true_bytes(one.bytes)
        return made
