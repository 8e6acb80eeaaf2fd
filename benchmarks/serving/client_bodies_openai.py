"""Bodies in OpenAI's form as known clients send them, for `client_bodies.py`.

Each name begins with the client.  Where a client samples, a seed or temperature 0 is added, so that the answer is one.
"""

from typing import Any

from benchmarks.serving.questions import (
    HELLO,
    NAMED,
    PERSON,
    RESPONSES,
    STREAMED,
    STRICT_TOOL,
    TOOL,
    WEATHER,
    Question,
    Questions,
    chat,
    completion,
)
from tests.vision_model import picture

FLAT_TOOL = {"type": "function", "name": "get_weather", "description": None, "parameters": WEATHER, "strict": True}
SECOND_TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
]
CACHED = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "who are you?"}]}]
SEEN = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": picture(1)}}]
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
STEP = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 5}}, "required": ["text"]}
NESTED = {
    "$defs": {"Step": STEP | {"additionalProperties": False, "title": "Step"}},
    "type": "object",
    "title": "Plan",
    "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 2}},
    "required": ["steps"],
    "additionalProperties": False,
}
PLAN = {"type": "json_schema", "json_schema": {"name": "Plan", "schema": NESTED, "strict": True}}


def response(name: str, **more: Any) -> Question:
    """Return a question in the form of OpenAI's responses."""
    return (
        name,
        RESPONSES,
        {"model": "demo", "input": "Say something", "max_output_tokens": 16, "temperature": 0} | more,
    )


def said(content: Any, role: str = "user", **more: Any) -> list[dict[str, Any]]:
    """Return messages of one."""
    return [{"role": role, "content": content} | more]


OPENAI_SDK: Questions = (
    ("openai: models", "GET models", {}),
    chat("openai: without a limit", max_tokens=None),
    chat("openai: max_completion_tokens", max_tokens=None, max_completion_tokens=9),
    chat("openai: both limits", max_completion_tokens=9),
    chat("openai: parse() of a nested class", response_format=PLAN, max_tokens=200),
    chat("openai: stream() of a nested class", response_format=PLAN, max_tokens=200, **STREAMED),
    chat("openai: text format", response_format={"type": "text"}),
    chat("openai: tools, one at a time", tools=[STRICT_TOOL], tool_choice="auto", parallel_tool_calls=False),
    chat(
        "openai: required, in parallel", tools=[TOOL], tool_choice="required", parallel_tool_calls=True, max_tokens=80
    ),
    chat("openai: no tool", tools=[TOOL], tool_choice="none"),
    chat("openai: named of two, streamed", tools=[SECOND_TOOL, TOOL], tool_choice=NAMED, max_tokens=80, **STREAMED),
    chat("openai: a tool's answer", messages=CALLED, tools=[TOOL]),
    chat("openai: text parts and names", messages=[{"role": "user", "name": "Ann", "content": PARTS[0]["content"]}]),
    chat("openai: a developer's message", messages=[*said("Be brief.", "developer"), *HELLO]),
    chat(
        "openai: what it did not want to say",
        messages=[*said([{"type": "refusal", "refusal": "No."}], "assistant"), *HELLO],
    ),
    chat(
        "openai: newer fields",
        store=False,
        metadata={"a": "b"},
        safety_identifier="me",
        prompt_cache_key="k",
        verbosity="low",
    ),
    chat("openai: effort", reasoning_effort="low"),
    chat("openai: modalities and a prediction", modalities=["text"], prediction={"type": "content", "content": "I"}),
    chat("openai: functions of old", functions=[TOOL["function"]], function_call="auto"),
    chat("openai: two choices, streamed", n=2, seed=3, temperature=1.0, **STREAMED),
    chat("openai: a tier", service_tier="auto"),
    chat("openai: an image for a model that sees none", messages=said(SEEN)),
    chat("openai: sound for a model that hears none", messages=said([SOUND])),
    chat("openai: a file", messages=said([{"type": "file", "file": {"file_id": "f1"}}])),
    response("openai: a response from messages", input=HELLO, instructions="Be brief."),
    response("openai: a response from parts", input=said([{"type": "input_text", "text": "Hello"}])),
    response(
        "openai: a response of a class",
        text={"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}},
        max_output_tokens=80,
    ),
    response("openai: a response with tools", tools=[FLAT_TOOL], tool_choice="auto"),
    response("openai: a response that calls", tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=80),
    response(
        "openai: a response to a tool",
        input=[
            *HELLO,
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        ],
        tools=[FLAT_TOOL],
    ),
    response(
        "Codex: a turn",
        input=said([{"type": "input_text", "text": "ls"}], type="message"),
        instructions="You are a coder.",
        tools=[FLAT_TOOL | {"strict": False}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning=None,
        store=False,
        stream=True,
        include=[],
        prompt_cache_key="k",
    ),
    response("openai: a web search", tools=[{"type": "web_search"}]),
)

FRAMEWORKS: Questions = (
    chat("LangChain: a call", stream=False, n=1),
    chat("LangChain: an agent's stop", stop=["\nObservation:", "\n\tObservation:"]),
    chat(
        "LangChain: with_structured_output", tools=[TOOL], tool_choice=NAMED, parallel_tool_calls=False, max_tokens=80
    ),
    chat("LangChain: JSON", response_format={"type": "json_object"}, max_tokens=30),
    completion(
        "LangChain: an LLM of old",
        prompt=["Once upon"],
        frequency_penalty=0,
        presence_penalty=0,
        n=1,
        best_of=1,
        logit_bias={},
        top_p=1,
        seed=None,
        logprobs=None,
    ),
    completion("LangChain: the best of two", n=1, best_of=2),
    chat("LlamaIndex: OpenAILike", stream=False, max_tokens=None, temperature=0, additional_kwargs={}),
    completion("LlamaIndex: a completion", stream=True, stop=None),
    chat(
        "Open WebUI: a chat",
        chat_id="c",
        session_id="s-1_x",
        features={},
        background_tasks={"title_generation": True},
        **STREAMED,
    ),
    chat("Open WebUI: a title", stream=False, max_tokens=None, max_completion_tokens=40),
    chat("LiteLLM: cached parts", messages=[{"role": "system", "content": [CACHED]}, *PARTS], user="me"),
    chat(
        "LiteLLM: null fields",
        stop=None,
        tools=None,
        tool_choice=None,
        logit_bias=None,
        seed=None,
        response_format=None,
        user=None,
    ),
    chat("Continue: a chat", stream=True, top_p=1, presence_penalty=0, frequency_penalty=0, stop=["<|im_end|>"]),
    completion("Continue: a gap to fill", prompt="def f(", suffix="\n    return x", stream=True, stop=["\n\n"]),
    completion(
        "Continue: a gap in the prompt",
        prompt="<fim_prefix>a<fim_suffix>b<fim_middle>",
        stream=True,
        stop=["<fim_prefix>", "\n"],
    ),
    chat("Cline: a task", messages=[*said("You are Cline.", "system"), *PARTS], **STREAMED),
    chat(
        "Cline: tools",
        messages=CALLED,
        tools=[TOOL, SECOND_TOOL],
        tool_choice="auto",
        parallel_tool_calls=False,
        **STREAMED,
    ),
    chat(
        "aider: a turn",
        messages=[*said("Act as a coder.", "system"), *HELLO, *said("Ok.", "assistant"), *HELLO],
        stream=True,
    ),
    chat(
        "Jan: llama.cpp's fields",
        cache_prompt=True,
        top_k=40,
        min_p=0.05,
        repeat_penalty=1.1,
        mirostat=0,
        typical_p=1,
        stream=True,
    ),
    completion("lm-eval: likelihoods", prompt=[[5, 60, 70], [5, 61]], max_tokens=1, logprobs=1, seed=1234, echo=True),
    completion("lm-eval: no token", prompt=[[5, 60, 70]], max_tokens=0, logprobs=1, echo=True),
    completion(
        "vllm bench: a prompt",
        stream=True,
        repetition_penalty=1.0,
        logprobs=None,
        ignore_eos=True,
        stream_options={"include_usage": True},
    ),
    completion(
        "guidellm: usage in every chunk",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
)
