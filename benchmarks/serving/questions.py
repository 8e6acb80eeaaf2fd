"""What is asked of `vllm serve` and of melld: each question by name, path and body."""

from typing import Any

from tests.audio_model import sound

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello, who are you?"}]
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": AGE},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}}
STRICT_TOOL = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
BEGUN = {"role": "assistant", "content": "I"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
RESPONSE = {"model": "demo", "input": "Say something", "max_output_tokens": 16, "temperature": 0}
MESSAGE = {"model": "demo", "messages": HELLO, "max_tokens": 16, "temperature": 0}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
Question = tuple[str, str, Any]
"""Name, path and body; a body that is text is sent as it stands, `GET PATH` without one."""
Questions = tuple[Question, ...]


def chat(name: str, **more: Any) -> Question:
    """Return a question for a chat completion; what is not said is greedy and short."""
    return name, CHAT, {"model": "demo", "messages": HELLO, "max_tokens": 24, "temperature": 0} | more


def completion(name: str, **more: Any) -> Question:
    """Return a question for a completion, likewise."""
    return name, COMPLETIONS, {"model": "demo", "prompt": "Once upon", "max_tokens": 24, "temperature": 0} | more


QUESTIONS = (
    chat("a chat"),
    chat("a chat, streamed", **STREAMED),
    chat("its log-probabilities", logprobs=True, top_logprobs=3),
    chat("its log-probabilities, streamed", logprobs=True, top_logprobs=2, **STREAMED),
    chat("three choices", n=3, temperature=1.0, seed=7),
    chat("penalties", presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2),
    chat("sampled with a seed", temperature=0.8, top_p=0.9, top_k=20, min_p=0.05, seed=11),
    chat("stop strings", stop=["e", "zz"], max_tokens=200),
    chat("stop strings, kept", stop=["e"], include_stop_str_in_output=True, max_tokens=200),
    chat("at least so many tokens", min_tokens=20, max_tokens=30),
    chat("a bias", logit_bias={"300": 50}),
    chat("bad words", bad_words=["the"]),
    chat("token ids", return_token_ids=True),
    chat("a system's message", messages=[{"role": "system", "content": "Be brief."}, *HELLO]),
    chat("the answer's beginning", messages=[*HELLO, BEGUN], add_generation_prompt=False, continue_final_message=True),
    chat("a schema", response_format=PERSON_FORMAT, max_tokens=1500),
    chat("a schema, streamed", response_format=PERSON_FORMAT, max_tokens=1500, **STREAMED),
    chat("any JSON object", response_format={"type": "json_object"}, max_tokens=60),
    chat("a regular expression", structured_outputs={"regex": "[a-c]{3}-[0-9]{4}"}),
    chat("a choice", structured_outputs={"choice": ["yes", "no"]}),
    chat("a grammar", structured_outputs={"grammar": 'root ::= "a" | "b" root'}),
    chat("a named tool", tools=[TOOL], tool_choice=NAMED, max_tokens=1500),
    chat("a named tool, streamed", tools=[TOOL], tool_choice=NAMED, max_tokens=1500, **STREAMED),
    chat("a named strict tool", tools=[STRICT_TOOL], tool_choice=NAMED, max_tokens=1500),
    chat("a required tool", tools=[TOOL], tool_choice="required", max_tokens=1500),
    chat("tools as it likes", tools=[TOOL], max_tokens=40),
    completion("a completion"),
    completion("a completion, streamed", **STREAMED),
    completion("a prompt of tokens", prompt=[5, 60, 70, 80]),
    completion("two prompts", prompt=["Once", "Twice"], n=2, temperature=1.0, seed=5),
    completion("echo with log-probabilities", echo=True, logprobs=2),
    completion("the prompt's log-probabilities", prompt_logprobs=1),
    completion("no tokens but the echo", echo=True, max_tokens=0, logprobs=1),
    completion("a suffix", suffix="the end"),
    ("a response", RESPONSES, RESPONSE),
    ("a response, streamed", RESPONSES, RESPONSE | {"stream": True}),
    ("a message", MESSAGES, MESSAGE),
    ("a message, streamed", MESSAGES, MESSAGE | {"stream": True}),
    ("tokens of a text", "/tokenize", {"model": "demo", "prompt": "Hello there"}),
    ("tokens of a chat", "/tokenize", {"model": "demo", "messages": HELLO, "return_token_strs": True}),
    ("text of tokens", "/detokenize", {"model": "demo", "tokens": [300, 301, 302]}),
    chat("a model that is not there", model="other"),
    chat("a temperature below zero", temperature=-1),
    chat("more tokens than there is room for", max_tokens=1_000_000),
    completion("a prompt that is too long", prompt=[5] * 5000),
    completion("a token that is none", prompt=[10_000_000]),
    chat("a regular expression that is none", structured_outputs={"regex": "("}),
    chat("no messages", messages=[]),
    chat("top log-probabilities without log-probabilities", top_logprobs=2),
)

DOCUMENTS = ["a block table", "another text", "what is a block table?"]
COMPARED: Questions = (
    ("scores", "/score", {"model": "demo", "queries": "a table", "documents": DOCUMENTS}),
    ("pairs", "/v1/score", {"model": "demo", "text_1": DOCUMENTS, "text_2": DOCUMENTS}),
    ("scores of short documents", "/score", {"data_1": "a table", "data_2": DOCUMENTS, "max_tokens_per_doc": 2}),
    ("the best two", "/rerank", {"model": "demo", "query": "a table", "documents": DOCUMENTS, "top_n": 2}),
    ("all, in Cohere's form", "/v2/rerank", {"query": "a table", "documents": DOCUMENTS}),
    ("documents that are none", "/rerank", {"query": "a table", "documents": 5}),
    ("three queries, two documents", "/score", {"queries": DOCUMENTS, "documents": DOCUMENTS[:2]}),
    ("pooled", "/pooling", {"model": "demo", "input": DOCUMENTS}),
    ("pooled, as base64", "/pooling", {"model": "demo", "input": DOCUMENTS, "encoding_format": "base64"}),
    ("a pooled chat", "/pooling", {"model": "demo", "messages": HELLO}),
)
CLASSES: Questions = (
    ("classes", "/classify", {"model": "demo", "input": DOCUMENTS}),
    ("logits", "/classify", {"model": "demo", "input": DOCUMENTS, "use_activation": False}),
)
EMBEDDINGS: Questions = (
    ("embeddings", "/v1/embeddings", {"model": "demo", "input": DOCUMENTS}),
    ("embeddings of tokens", "/v1/embeddings", {"input": [[5, 6, 7], [8, 9]], "encoding_format": "base64"}),
)


def greedy(questions: Questions) -> Questions:
    """Return those without a seed: another draft changes its draws.  Log-probabilities differ in their last bits."""
    return tuple(one for one in questions if not {"seed", "logprobs", "prompt_logprobs"} & one[2].keys())


def asked_of(name: str, questions: Questions) -> Questions:
    """Return the same questions to the model of this name."""
    return tuple((what, path, body | {"model": name}) for what, path, body in questions if body.get("model") == "demo")


def heard(name: str, path: str = "transcriptions", **more: Any) -> Question:
    """Return a question about two seconds of audio; a form has words alone."""
    form = {"file": sound(1), "model": "demo", "language": "en", "max_completion_tokens": "40"} | more
    return name, f"audio/{path}", {key: value for key, value in form.items() if value is not None}


HEARD: Questions = (
    heard("a transcription"),
    heard("a transcription, streamed", stream="true", stream_include_usage="true"),
    heard("of three pieces", file=sound(2, 8.0)),
    heard("of three pieces, streamed", file=sound(2, 8.0), stream="true"),
    heard("with its times", response_format="verbose_json"),
    heard("as text", response_format="text"),
    heard("in a language to be found out", language=None, response_format="verbose_json"),
    heard("after a prompt", prompt="Once upon"),
    heard("sampled with a seed", temperature="0.9", seed="7"),
    heard("by beam search", use_beam_search="true", n="2"),
    heard("a translation", "translations"),
    heard("a translation, streamed", "translations", stream="true"),
    heard("a format that is not made", response_format="srt"),
    heard("a language that is none", language="xx"),
    heard("a file that is no audio", file=b"RIFF"),
    heard("a temperature below zero", temperature="-1"),
    heard("a model that is not there", model="other"),
)
