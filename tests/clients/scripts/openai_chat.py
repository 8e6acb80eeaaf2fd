"""The `openai` package, chat completions."""

import json

from asked import ABOUT, KEY, MODEL, PARAMETERS, PROMPT, URL, get_weather, tell, wait
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
tool = {
    "type": "function",
    "function": {"name": "get_weather", "description": ABOUT, "parameters": PARAMETERS, "strict": True},
}
messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
while True:
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        left = tell(event.delta for event in stream if event.type == "content.delta")
        answer = None if left else stream.get_final_completion()
    if left:
        wait()
        break
    assert answer.usage.total_tokens > 0
    message = answer.choices[0].message
    if not message.tool_calls:
        break
    messages.append(message)
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
