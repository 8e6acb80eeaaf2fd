"""The `openai-agents` package, over responses."""

import asyncio

import agents
from asked import KEY, MODEL, PROMPT, STOP_AFTER, URL, get_weather, wait
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
agent = agents.Agent("greeter", instructions="Be brief.", model=model, tools=[agents.function_tool(get_weather)])


async def main() -> None:
    """Print the answer; wait once the run has been cancelled."""
    run, count = agents.Runner.run_streamed(agent, PROMPT), 0
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)
            count += 1
            if count == STOP_AFTER:
                run.cancel()
    if STOP_AFTER:
        await asyncio.to_thread(wait)


asyncio.run(main())
