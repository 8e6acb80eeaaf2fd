"""Bodies as known clients send them, for `answers_vs_vllm.py`.

Each name begins with the client.  Where a client samples, a seed or temperature 0 is added, so that the answer is one.
"""

from typing import Any

from benchmarks.serving.client_bodies_openai import CACHED, CALLED, FRAMEWORKS, OPENAI_SDK, PLAN, response, said
from benchmarks.serving.questions import (
    BEGUN,
    DOCUMENTS,
    HELLO,
    MESSAGES,
    PERSON,
    STREAMED,
    TOOL,
    WEATHER,
    Question,
    Questions,
    chat,
    completion,
)
from tests.listening_model import spoken
from tests.vision_model import picture

ANTHROPIC_TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}
TAGS = {"begin": "<f>", "schema": WEATHER, "end": "</f>"}


def message(name: str, beta: bool = False, **more: Any) -> Question:
    """Return a question in Anthropic's form."""
    path = MESSAGES + ("?beta=true" if beta else "")
    return name, path, {"model": "demo", "messages": HELLO, "max_tokens": 24, "temperature": 0} | more


ANTHROPIC: Questions = (
    message("anthropic: a system", system="Be brief."),
    message("anthropic: stop sequences", stop_sequences=["e"], top_k=5, top_p=0.9),
    message("anthropic: tools", tools=[ANTHROPIC_TOOL], tool_choice={"type": "auto"}),
    message("anthropic: any tool", tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=80),
    message(
        "anthropic: a named tool, streamed",
        tools=[ANTHROPIC_TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_tokens=80,
        stream=True,
    ),
    message(
        "anthropic: a tool's answer",
        messages=[
            *HELLO,
            *said(
                [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                ],
                "assistant",
            ),
            *said([{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny"}]}]),
        ],
        tools=[ANTHROPIC_TOOL],
    ),
    message("anthropic: thinking", thinking={"type": "enabled", "budget_tokens": 1024}),
    message(
        "anthropic: an image",
        messages=said(
            [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": picture(1).partition(",")[2]},
                }
            ]
        ),
    ),
    message("anthropic: no limit", max_tokens=None),
    message("anthropic: the answer's beginning", messages=[*HELLO, BEGUN]),
    message("anthropic: a schema", output_config={"format": {"type": "json_schema", "schema": PERSON}}, max_tokens=80),
    message(
        "Claude Code: a turn",
        beta=True,
        system=[CACHED],
        metadata={"user_id": "u"},
        tools=[ANTHROPIC_TOOL],
        stream=True,
    ),
    (
        "Claude Code: a count",
        MESSAGES + "/count_tokens?beta=true",
        {"model": "demo", "messages": HELLO, "system": [CACHED], "tools": [ANTHROPIC_TOOL]},
    ),
)

EXAMPLES: Questions = (
    chat("vLLM: thinking off", chat_template_kwargs={"enable_thinking": False}),
    chat("vLLM: a template", chat_template="{{ messages[0].content }}"),
    chat("vLLM: some tokens alone", allowed_token_ids=[300, 301, 302], max_tokens=5),
    chat("vLLM: stop tokens", stop_token_ids=[300], ignore_eos=True),
    chat("vLLM: special tokens shown", skip_special_tokens=False, spaces_between_special_tokens=False),
    chat("vLLM: tokens as ids", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    chat("vLLM: ids, streamed", return_token_ids=True, **STREAMED),
    chat("vLLM: the prompt's log-probabilities", prompt_logprobs=2),
    chat("vLLM: log-probabilities of some", logprobs=True, logprob_token_ids=[300, 301]),
    chat("vLLM: the prompt's end", truncate_prompt_tokens=8),
    chat("vLLM: beams", n=2, use_beam_search=True, max_tokens=6),
    chat("vLLM: a salt", cache_salt="pepper"),
    chat("vLLM: documents", documents=[{"title": "A", "text": "b"}]),
    chat("vLLM: the prompt's text", return_prompt_text=True),
    chat("vLLM: repetition found", repetition_detection={"max_pattern_size": 4, "min_count": 3}),
    chat("vLLM: a budget of thinking", thinking_token_budget=8),
    chat("vLLM: echo", messages=[*HELLO, BEGUN], echo=True, add_generation_prompt=False, continue_final_message=True),
    chat(
        "vLLM: a structural tag", response_format={"type": "structural_tag", "structures": [TAGS], "triggers": ["<f>"]}
    ),
    chat("vLLM: two constraints", structured_outputs={"choice": ["a"], "regex": "b"}),
    chat("vLLM: choices of old", guided_choice=["yes", "no"]),
    chat("vLLM: a priority", priority=1),
    completion("vLLM: a schema", structured_outputs={"json": PERSON}, max_tokens=80),
    completion("vLLM: a chat's format", response_format=PLAN, max_tokens=80),
    completion("vLLM: without special tokens", add_special_tokens=False, return_token_ids=True),
    completion("vLLM: text beside ids", prompt=["Once", "Twice"], echo=True, **STREAMED),
    ("vLLM: tokens of a chat with tools", "/tokenize", {"model": "demo", "messages": CALLED, "tools": [TOOL]}),
    ("vLLM: its version", "GET /version", {}),
    ("vLLM: no tokens", "/detokenize", {"model": "demo", "tokens": []}),
)

MISTAKES: Questions = (
    ("curl: no model", "chat/completions", {"messages": HELLO, "max_tokens": 5, "temperature": 0}),
    ("curl: half of a body", "chat/completions", '{"model": "demo", '),
    ("curl: a list", "chat/completions", "[]"),
    ("curl: no body", "chat/completions", ""),
    ("curl: a GET", "GET chat/completions", {}),
    ("curl: another path", "chat/completion", {"model": "demo"}),
    ("curl: no prompt", "completions", {"model": "demo", "max_tokens": 5}),
    ("curl: no messages", "chat/completions", {"model": "demo"}),
    completion("curl: an empty prompt", prompt=""),
    completion("curl: an empty list", prompt=[]),
    completion("curl: an empty list of tokens", prompt=[[]]),
    completion("curl: a model of another name", model="gpt-4o"),
    chat("curl: text for messages", messages="Hello"),
    chat("curl: an empty message", messages=said("")),
    chat("curl: no content", messages=[{"role": "user"}]),
    chat("curl: a number as content", messages=said(5)),
    chat("curl: an unknown role", messages=said("Hello", "robot")),
    chat("curl: an unknown part", messages=said([{"type": "smell", "smell": "roses"}])),
    chat("curl: a system alone", messages=said("Be brief.", "system")),
    chat("curl: a number as text", max_tokens="5"),
    chat("curl: a word as number", temperature="hot"),
    chat("curl: a word as stream", stream="yes"),
    chat("curl: a number as model", model=5),
    chat("curl: no token", max_tokens=0),
    chat("curl: minus one token", max_tokens=-1),
    chat("curl: no choice", n=0),
    chat("curl: a share of two", top_p=2),
    chat("curl: a stop of nothing", stop=""),
    chat("curl: five stops", stop=["a", "b", "c", "d", "zz"]),
    chat("curl: too many log-probabilities", logprobs=True, top_logprobs=500),
    chat("curl: a long seed", seed=2**70),
    chat("curl: a bias of a word", logit_bias={"the": 5}),
    chat("curl: a bias of a token that is none", logit_bias={"999999": 5}),
    chat("curl: no tools", tools=[]),
    chat("curl: a choice without tools", tool_choice="required"),
    chat("curl: an unknown tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    chat("curl: a tool without a name", tools=[{"type": "function", "function": {}}]),
    chat("curl: an unknown format", response_format={"type": "xml"}),
    chat("curl: a format without a schema", response_format={"type": "json_schema"}),
    chat(
        "curl: a schema that is none",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}},
    ),
    chat("curl: a stream's options without a stream", stream_options={"include_usage": True}),
    chat("curl: more tokens at least than at most", min_tokens=30, max_tokens=5),
    chat("curl: going on and beginning", messages=[*HELLO, BEGUN], continue_final_message=True),
    chat("curl: a field that is none", no_such_field=1),
)

CLIENTS: Questions = OPENAI_SDK + FRAMEWORKS + ANTHROPIC + EXAMPLES + MISTAKES

TEXTS = {"texts": DOCUMENTS, "input_type": "search_query", "model": "demo"}
EMBEDDING_CLIENTS: Questions = (
    ("openai: embeddings", "embeddings", {"model": "demo", "input": "a table", "encoding_format": "base64"}),
    (
        "LangChain: embeddings of tokens",
        "embeddings",
        {"model": "demo", "input": [[5, 6], [7]], "encoding_format": "base64"},
    ),
    ("LlamaIndex: embeddings", "embeddings", {"model": "demo", "input": ["a table"], "dimensions": None}),
    ("openai: fewer dimensions", "embeddings", {"model": "demo", "input": "a table", "dimensions": 8}),
    ("openai: an unknown encoding", "embeddings", {"model": "demo", "input": "a", "encoding_format": "hex"}),
    ("openai: nothing to embed", "embeddings", {"model": "demo", "input": ""}),
    ("openai: an empty list to embed", "embeddings", {"model": "demo", "input": []}),
    ("openai: no input", "embeddings", {"model": "demo"}),
    (
        "Jina: embeddings",
        "embeddings",
        {"model": "demo", "input": DOCUMENTS, "task": "text-matching", "truncate": True},
    ),
    (
        "Jina: a rerank",
        "rerank",
        {"model": "demo", "query": "a table", "documents": DOCUMENTS, "top_n": 2, "return_documents": False},
    ),
    (
        "Cohere: a rerank",
        "/v2/rerank",
        {"model": "demo", "query": "a table", "documents": DOCUMENTS, "max_tokens_per_doc": 4096},
    ),
    ("Cohere: a rerank of objects", "/v1/rerank", {"model": "demo", "query": "a", "documents": [{"text": "a table"}]}),
    ("Cohere: embeddings", "/v2/embed", TEXTS | {"embedding_types": ["float"]}),
    (
        "Cohere: embeddings, as base64",
        "/v2/embed",
        TEXTS | {"embedding_types": ["base64", "ubinary"], "truncate": "NONE"},
    ),
    ("Cohere: an unknown type", "/v2/embed", TEXTS | {"embedding_types": ["float128"]}),
    ("Open WebUI: a rerank", "rerank", {"model": "demo", "query": "a table", "documents": DOCUMENTS, "top_n": 3}),
    ("LiteLLM: a rerank without documents", "rerank", {"model": "demo", "query": "a table", "documents": []}),
    ("curl: a chat of a model that embeds", "chat/completions", {"model": "demo", "messages": HELLO}),
    ("curl: tokens", "/tokenize", {"model": "demo", "prompt": "Hello", "add_special_tokens": False}),
)


def shown(name: str, *parts: Any, **more: Any) -> Question:
    """Return a question about images."""
    return chat(name, messages=said([{"type": "text", "text": "What is it?"}, *parts]), **more)


def image(url: Any, **more: Any) -> dict[str, Any]:
    """Return a part with an image."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


BASE64 = {"type": "base64", "media_type": "image/png", "data": picture(1).partition(",")[2]}
SPOKEN_URL = "data:audio/wav;base64," + spoken(3)["input_audio"]["data"]
FROM_URL = {"type": "url", "url": picture(2)}
INPUT_IMAGE = {"type": "input_image", "image_url": picture(1), "detail": "auto"}
IMAGE_CLIENTS: Questions = (
    shown("openai: an image", image(picture(1))),
    shown("openai: an image, streamed", image(picture(1), detail="low"), **STREAMED),
    shown("openai: two images", image(picture(1)), image(picture(2), detail="auto")),
    shown("LangChain: an image's URL alone", {"type": "image_url", "image_url": picture(2)}),
    shown("LangChain: an image in its own form", {"type": "image", "base64": BASE64["data"], "mime_type": "image/png"}),
    shown("vLLM: an image without its type", {"image_url": {"url": picture(1)}}),
    shown("vLLM: an image with a name", image(picture(1)) | {"uuid": "a"}),
    shown("vLLM: a name alone", {"type": "image_url", "image_url": None, "uuid": "b"}),
    shown("Open WebUI: an image and a history", image(picture(3)), n=2, seed=5, temperature=1.0),
    shown("Cline: an image and tools", image(picture(2)), tools=[TOOL], tool_choice="auto"),
    shown("curl: an image that is none", image("data:image/png;base64,AAAA")),
    shown("curl: half of a URL", image("data:image/png")),
    shown("curl: an unknown scheme", image("ftp://example.com/a.png")),
    shown("curl: a file of the server", image("file:///etc/hostname")),
    shown("curl: no URL", image(None)),
    shown("curl: a sound", {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
    response(
        "openai: a response about an image",
        input=said([{"type": "input_image", "image_url": picture(1), "detail": "auto"}]),
    ),
    message("anthropic: an image", messages=said([{"type": "image", "source": BASE64}])),
    message(
        "anthropic: an image by its URL",
        messages=said([{"type": "image", "source": {"type": "url", "url": picture(2)}}]),
    ),
    ("vLLM: tokens of an image", "/tokenize", {"model": "demo", "messages": said([image(picture(1))])}),
)
AUDIO_CLIENTS: Questions = (
    chat("openai: a sound", messages=said([{"type": "text", "text": "What is it?"}, spoken(1)])),
    chat("openai: a sound, streamed", messages=said([spoken(2)]), **STREAMED),
    chat("openai: two sounds", messages=said([spoken(1), spoken(2)])),
    chat("vLLM: a sound's URL", messages=said([{"type": "audio_url", "audio_url": {"url": SPOKEN_URL}}])),
    chat("curl: a sound that is none", messages=said([{"type": "input_audio", "input_audio": {"data": "AAAA"}}])),
    shown("curl: an image", image(picture(1))),
)
API = "docs/api.md"
BEGIN = f"{API}: a response's prompt has a single begin token"
CUT = f"{API}: a truncated response's item is incomplete"
CACHED = f"{API}: usage includes the cached tokens of every response, so in message_start too"
PARTS = f"{API}: tokens that are parts of characters have their bytes"
DECIDED = {
    "openai: functions of old": f"{API}: refused, functions",
    "openai: a response from messages": BEGIN,
    "openai: a response from parts": BEGIN,
    "openai: a response of a class": BEGIN,
    "openai: a response with tools": BEGIN,
    "openai: a response that calls": BEGIN,
    "openai: a response to a tool": BEGIN,
    "openai: a response about an image": BEGIN,
    "Codex: a turn": CUT,
    "openai: a web search": BEGIN,
    "lm-eval: no token": f"{API}: usage counts no token where none was asked for",
    "anthropic: a system": CACHED,
    "anthropic: a named tool, streamed": CACHED,
    "anthropic: the answer's beginning": f"{API}: a final assistant message is continued",
    "Claude Code: a turn": CACHED,
    "Jina: a rerank": f"{API}: return_documents is honoured",
    "Cohere: a rerank of objects": f"{API}: documents may be objects",
    "vLLM: tokens as ids": PARTS,
    "vLLM: the prompt's log-probabilities": PARTS,
    "vLLM: log-probabilities of some": PARTS,
    "openai: models": f"{API}: a card has the model's status",
    "vLLM: its version": f"{API}: /version names melld's and vLLM's",
    "LangChain: the best of two": f"{API}: refused, best_of above n",
    "vLLM: choices of old": f"{API}: refused, guided_*",
    "curl: a file of the server": f"{API}: refused with a 400, file: URLs; vLLM answers 500",
    "curl: a chat of a model that embeds": f"{API}: 400, a model that cannot; vLLM answers 404",
}
"""Questions whose answers differ from vLLM's, as the documents say."""
AT_ONCE = dict.fromkeys(
    ("vLLM: a schema", "vLLM: a chat's format"), f"{API}: constraints on /v1/completions apply from the first token"
)
"""Likewise, of a model that reasons."""
