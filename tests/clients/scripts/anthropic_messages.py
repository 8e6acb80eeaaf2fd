"""The `anthropic` package."""

from anthropic import Anthropic
from asked import ABOUT, KEY, MODEL, PARAMETERS, PROMPT, URL, get_weather, tell, wait

client = Anthropic(base_url=URL, api_key=KEY)
tool = {"name": "get_weather", "description": ABOUT, "input_schema": PARAMETERS}
messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]}]
assert client.messages.count_tokens(model=MODEL, messages=messages, tools=[tool]).input_tokens > 0
while True:
    with client.messages.stream(
        model=MODEL, max_tokens=8192, system="Be brief.", messages=messages, tools=[tool]
    ) as stream:
        left = tell(stream.text_stream)
        answer = None if left else stream.get_final_message()
    if left:
        wait()
        break
    if answer.stop_reason != "tool_use":
        assert answer.stop_reason == "end_turn"
        break
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
