"""LiteLLM: the prefix says which API it speaks."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet first, and warns amid the answer

import litellm
from asked import ABOUT, KEY, MODEL, PARAMETERS, PROMPT, URL, get_weather, tell, wait

tool = {"type": "function", "function": {"name": "get_weather", "description": ABOUT, "parameters": PARAMETERS}}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
while True:
    stream = litellm.completion(
        model=f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, messages=messages, tools=[tool], stream=True
    )
    pieces = []
    if tell((pieces.append(piece) or piece.choices[0].delta.content) for piece in stream):
        stream.completion_stream.close()
        wait()
        break
    message = litellm.stream_chunk_builder(pieces).choices[0].message
    if not message.tool_calls:
        break
    messages.append(message.model_dump())
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
