"""The `openai` package, responses."""

import json

from asked import ABOUT, KEY, MODEL, PARAMETERS, PROMPT, URL, get_weather, tell, wait
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
tool = {"type": "function", "name": "get_weather", "description": ABOUT, "parameters": PARAMETERS, "strict": True}
said = [{"role": "user", "content": PROMPT}]
while True:
    with client.responses.stream(
        model=MODEL, instructions="Be brief.", input=said, tools=[tool], store=False
    ) as stream:
        left = tell(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = None if left else stream.get_final_response()
    if left:
        wait()
        break
    assert answer.usage.total_tokens > 0
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    said += answer.output
    for call in calls:
        result = get_weather(**json.loads(call.arguments))
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
