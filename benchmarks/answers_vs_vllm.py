"""The same questions to `vllm serve` and to melld: is every answer the same?

    PYTHONPATH=. .venv/bin/python benchmarks/answers_vs_vllm.py [KIND...] [--write]

For each kind of model, by default the demo model alone: one worker each, the same model and arguments, greedy or
seeded.  Whole answers are compared field by field; ids, times and the like are made by chance and left out.  Of a
stream the pieces are joined first: how many tokens share a chunk is a matter of pace.  Of an error only the status is
compared: melld's have the fields of OpenAI's, vLLM's their own.
Prints both answers where they differ, and ends with 1 when any do.
"""

import argparse
import datetime
import difflib
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import tables
from benchmarks.serve_vs_vllm import vllm_serve
from benchmarks.setting import CPU
from melld.demo_model import make_demo_model
from tests.audio_model import make_hearing_model, sound
from tests.serve.daemon_process import DaemonProcess
from tests.tiny_models import make_adapter, make_drafter, make_eagle, make_reranker, make_windowed

TABLE = "answers-vs-vllm"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello, who are you?"}]
# Made by chance, or the time of day; and the tier, which vLLM does not tell.
PASSING = frozenset({"id", "item_id", "created", "created_at", "completed_at", "system_fingerprint", "call_id"})
PASSING |= {"service_tier"}
# Of a stream: a count of its events, and what comes in pieces.
COUNTED, PIECES = frozenset({"sequence_number"}), frozenset({"content", "text", "delta", "arguments", "partial_json"})
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


def chat(name: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """Return a question for a chat completion; what is not said is greedy and short."""
    return name, CHAT, {"model": "demo", "messages": HELLO, "max_tokens": 24, "temperature": 0} | more


def completion(name: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
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
Questions = tuple[tuple[str, str, dict[str, Any]], ...]
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


class Kind(NamedTuple):
    """A model, the options that both servers get, and what is asked."""

    make: Callable[[Path], None]
    options: dict[str, Any]
    """`DIR` stands for the directory that the model is made in."""
    questions: Questions
    of_vllm: tuple[str, ...] = ()
    """Words of `vllm serve` alone, for what melld has keys of its own for."""
    of_melld: tuple[str, ...] = ()


KINDS = {
    "chat": Kind(make_demo_model, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}, QUESTIONS),
    "scores": Kind(make_reranker, {}, COMPARED + CLASSES),
    "embeddings": Kind(make_demo_model, {"runner": "pooling"}, COMPARED + EMBEDDINGS),
}


def make_drafted(directory: Path) -> None:
    """Make the demo model, and a drafter beside it."""
    make_demo_model(directory)
    make_drafter(directory, directory.parent / "drafter", 3)


def greedy(questions: Questions) -> Questions:
    """Return those without a seed: another draft changes its draws.  Log-probabilities differ in their last bits."""
    return tuple(one for one in questions if not {"seed", "logprobs", "prompt_logprobs"} & one[2].keys())


DRAFT_MODEL = {"method": "draft_model", "model": "DIR/drafter", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
EAGLE = {"method": "eagle", "model": "DIR/head", "num_speculative_tokens": 3}


def make_headed(directory: Path) -> None:
    """Make the demo model, and an EAGLE head beside it."""
    make_demo_model(directory)
    make_eagle(directory, directory.parent / "head")


def make_adapted(directory: Path) -> None:
    """Make the demo model, and an adapter beside it."""
    make_demo_model(directory)
    make_adapter(directory.parent / "poet", 1)


def asked_of(name: str, questions: Questions) -> Questions:
    """Return the same questions to the model of this name."""
    return tuple((what, path, body | {"model": name}) for what, path, body in questions if body.get("model") == "demo")


def heard(name: str, path: str = "transcriptions", **more: Any) -> tuple[str, str, dict[str, Any]]:
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


KINDS |= {
    "audio": Kind(make_hearing_model, {}, HEARD),
    "adapter": Kind(
        make_adapted,
        {},
        QUESTIONS + asked_of("poet", QUESTIONS),
        ("--enable-lora", "--lora-modules", "poet=DIR/poet", "--max-loras", "2", "--max-lora-rank", "8"),
        ("--set", 'model.lora=[{name = "poet", path = "DIR/poet"}]'),
    ),
    "eagle": Kind(make_headed, {"speculative_config": EAGLE, "max_model_len": 8192}, greedy(QUESTIONS)),
    "drafts": Kind(make_drafted, {"speculative_config": DRAFT_MODEL, "max_model_len": 8192}, greedy(QUESTIONS)),
    "windows": Kind(make_windowed, {}, QUESTIONS),
    "ngram": Kind(make_demo_model, {"speculative_config": NGRAM}, greedy(QUESTIONS)),
}


def flags_for_vllm(options: dict[str, Any]) -> list[str]:
    """Return the words of `vllm serve` for these options."""
    words: list[str] = []
    for key, value in options.items():
        words.append("--" + key.replace("_", "-"))
        words += [] if value is True else [value if isinstance(value, str) else json.dumps(value)]
    return words


def flags_for_melld(options: dict[str, Any]) -> list[str]:
    """Return the words of `melld serve` for these options."""
    return [w for key, value in options.items() for w in ("--set", f"model.vllm.{key}={toml(value)}")]


def toml(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status, and what of the answer is compared."""
    address = url + (path if path.startswith("/") else f"/v1/{path}")
    if "file" in body:
        words = {name: value for name, value in body.items() if name != "file"}
        form = httpx.Request("POST", address, data=words, files={"file": ("a.wav", body["file"])})
        sent, kind = form.read(), form.headers["Content-Type"]
    else:
        sent, kind = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(address, sent, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        status, text, kind = error.code, error.read().decode(), error.headers["Content-Type"]
    if status != 200:
        return status, "an error"
    if not kind.startswith("text/event-stream"):
        return status, lasting(json.loads(text))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return status, joined([event if event == "[DONE]" else lasting(json.loads(event)) for event in events])


def joined(events: list[Any]) -> dict[str, Any]:
    """Return a stream, path by path: the pieces of a text as one, of anything else each value once."""
    found: dict[str, Any] = {}
    for event in events:
        for path, value in leaves(event, ""):
            key = path.rsplit(".", 1)[-1]
            if key in PIECES and isinstance(value, str):
                found[path + ", joined"] = found.get(path + ", joined", "") + value
            elif key not in COUNTED and value not in found.setdefault(path, []):
                found[path].append(value)
    return found


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return what is neither object nor list, by its path; an event's and a choice's path begins with which it is."""
    if isinstance(value, dict):
        path += f"/{value.get('type', value.get('index', ''))}"
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, path)
    else:
        yield path, value


def lasting(value: Any) -> Any:
    """Without what is made by chance."""
    if isinstance(value, dict):
        return {key: lasting(one) for key, one in value.items() if key not in PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def difference(theirs: tuple[int, Any], ours: tuple[int, Any]) -> str:
    """Line by line; empty where there is none."""
    lines = [[f"status {status}", *json.dumps(body, indent=1).splitlines()] for status, body in (theirs, ours)]
    return "\n".join(difflib.unified_diff(*lines, "vLLM", "melld", lineterm="", n=1))


def main() -> int:
    """Ask both servers all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; chat by default")
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results, where other kinds stay")
    arguments = parser.parse_args()
    counts = {name: compare(KINDS[name], arguments.show) for name in arguments.kinds or ["chat"]}
    if arguments.write:
        write(counts)
    return int(any(counts.values()))


def write(different: dict[str, int]) -> None:
    """Record the counts beside those of other kinds."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = "PYTHONPATH=. python benchmarks/answers_vs_vllm.py KIND --write"
    known = {row[0]: row for row in tables.load(TABLE)["rows"]} if (tables.RESULTS / f"{TABLE}.json").exists() else {}
    known |= {
        kind: [kind, str(len(KINDS[kind].questions)), str(len(KINDS[kind].questions) - count), today]
        for kind, count in different.items()
    }
    columns = ["kind", "questions", "same answers", "asked"]
    table = tables.Table(command=command, date=today, machine="2-core VM", columns=columns, rows=list(known.values()))
    tables.save(tables.RESULTS, TABLE, table)


def compare(kind: Kind, show: bool) -> int:
    """Ask both; return how many answers differ."""
    different = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "demo"
        kind.make(model)
        options = json.loads(json.dumps(kind.options).replace("DIR", name))
        theirs_alone, ours_alone = ([w.replace("DIR", name) for w in words] for words in (kind.of_vllm, kind.of_melld))
        with (
            vllm_serve(model, 18_312, directory, *flags_for_vllm(options), *theirs_alone) as theirs,
            DaemonProcess(model, *CPU.serve_flags(1), *flags_for_melld(options), *ours_alone) as daemon,
        ):
            ours = daemon.wait_ready().url
            for question, path, body in kind.questions:
                answers = ask(theirs, path, body), ask(ours, path, body)
                found = difference(*answers)
                different += bool(found)
                print(f"{'DIFFERENT' if found else 'same':9} {answers[1][0]} {question}", flush=True)
                if found or show:
                    print(found or json.dumps(answers[1][1], ensure_ascii=False)[:2000], flush=True)
    print(f"{len(kind.questions) - different} of {len(kind.questions)} answers are the same")
    return different


if __name__ == "__main__":
    sys.exit(main())
