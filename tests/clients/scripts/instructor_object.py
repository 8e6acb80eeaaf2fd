"""Instructor: an object from a tool call that it demands, partly known while it streams."""

import instructor
from asked import KEY, MODEL, PROMPT, URL, get_weather, tell, wait
from openai import OpenAI
from pydantic import BaseModel

client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY))
messages = [{"role": "user", "content": PROMPT}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


if "ecite" in PROMPT:
    stream = client.chat.completions.create(model=MODEL, messages=messages, response_model=None, stream=True)
    if tell(piece.choices[0].delta.content for piece in stream if piece.choices):
        stream.close()
        wait()
else:
    *_, found = client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=Weather)
    get_weather(found.city, found.degrees)
    whole = client.chat.completions.create(model=MODEL, messages=messages, response_model=Weather)
    assert whole.model_dump() == found.model_dump()
