"""smolagents: a tool calling agent, which demands a tool call in each turn."""

from asked import KEY, MODEL, PROMPT, URL, get_weather, tell, wait
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
if "ecite" in PROMPT:
    stream = model.generate_stream([{"role": "user", "content": [{"type": "text", "text": PROMPT}]}])
    if tell(piece.content for piece in stream):
        model.client.close()  # it keeps the answer's connection otherwise
        wait()
else:
    get_weather.__doc__ += "\n\nArgs:\n    city: its name\n    degrees: in Celsius"
    agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, stream_outputs=True, max_steps=3)
    print(agent.run(PROMPT))
