"""Pydantic AI, over OpenAI's chat completions."""

import asyncio

from asked import KEY, MODEL, PROMPT, STOP_AFTER, URL, get_weather, wait
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
agent = Agent(model, instructions="Be brief.", tools=[get_weather])


async def main() -> bool:
    """Return True if the stream was left."""
    async with agent.run_stream(PROMPT) as answer:
        count = 0
        async for text in answer.stream_text(delta=True, debounce_by=None):
            print(text, end="", flush=True)
            count += 1
            if count == STOP_AFTER:
                await answer.cancel() if hasattr(answer, "cancel") else None
                return True
    return False


if asyncio.run(main()):
    wait()
