"""LangChain, with its package for OpenAI's API or, with the word `anthropic`, for Anthropic's."""

import sys

import asked
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

if "anthropic" in sys.argv:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(base_url=asked.URL, api_key=asked.KEY, model=asked.MODEL, max_tokens=8192)
else:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{asked.URL}/v1", api_key=asked.KEY, model=asked.MODEL, stream_usage=True)
weather = tool(asked.get_weather)
messages = [SystemMessage("Be brief."), HumanMessage(asked.PROMPT)]
answer = None


def texts(stream):
    """Yield the texts of an answer, and put its pieces together."""
    global answer  # noqa: PLW0603 - a script
    for piece in stream:
        answer = piece if answer is None else answer + piece
        yield piece.text


while True:
    stream, answer = chat.bind_tools([weather]).stream(messages), None
    if asked.tell(texts(stream)):
        stream.close()
        asked.wait()
        break
    if not answer.tool_calls:
        assert answer.usage_metadata["total_tokens"] > 0
        break
    messages += [
        answer,
        *(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls),
    ]
