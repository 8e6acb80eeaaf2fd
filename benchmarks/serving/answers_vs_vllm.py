"""The same questions to `vllm serve` and to melld: is every answer the same?

    python -m benchmarks.serving.answers_vs_vllm [KIND...] [--whole] [--write]

For each kind of model, by default the demo model alone: one worker each, the same model and arguments, greedy or
seeded.  Whole answers are compared field by field; ids, times and the like are made by chance and left out.  Of a
stream the pieces are joined first: how many tokens share a chunk is a matter of pace.  Of an error only the status is
compared: melld's have the fields of OpenAI's, vLLM's their own.
Prints both answers where they differ, and ends with 1 when any do.  `--whole`: of a melld whose events vLLM makes.
"""

import datetime
import difflib
import functools
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import harness
from benchmarks.harness import CPU
from benchmarks.serving.client_bodies import AT_ONCE, AUDIO_CLIENTS, CLIENTS, DECIDED, EMBEDDING_CLIENTS, IMAGE_CLIENTS
from benchmarks.serving.questions import CLASSES, COMPARED, EMBEDDINGS, HEARD, QUESTIONS, Questions, asked_of, greedy
from benchmarks.serving.serve_vs_vllm import vllm_serve
from melld.demo_model import make_demo_model
from tests.audio_model import make_hearing_model
from tests.families.every import make_model_of
from tests.listening_model import make_listening_model
from tests.serve.daemon_process import DaemonProcess
from tests.tiny_models import make_adapter, make_drafter, make_eagle, make_reranker
from tests.vision_model import make_vision_model

TABLE = "answers-vs-vllm"
SIDES = ("vLLM", "melld")
# Made by chance, or the time of day; and what vLLM does not tell: the tier, and reasoning under its other name.
PASSING = frozenset(
    {"id", "item_id", "created", "created_at", "completed_at", "system_fingerprint", "call_id", "signature"}
)
PASSING |= {"service_tier", "reasoning_content"}
# Of a stream: a count of its events, and what comes in pieces.
COUNTED = frozenset({"sequence_number"})
PIECES = frozenset({"content", "reasoning", "thinking", "text", "delta", "arguments", "partial_json"})


class Kind(NamedTuple):
    """A model, the options that both servers get, and what is asked."""

    make: Callable[[Path], None]
    options: dict[str, Any]
    """`DIR` stands for the directory that the model is made in."""
    questions: Questions
    of_vllm: tuple[str, ...] = ()
    """Words of `vllm serve` alone, for what melld has keys of its own for."""
    of_melld: tuple[str, ...] = ()
    decided: dict[str, str] = DECIDED


TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
KINDS = {
    "chat": Kind(make_demo_model, TOOLS, QUESTIONS),
    "scores": Kind(make_reranker, {}, COMPARED + CLASSES),
    "embeddings": Kind(make_demo_model, {"runner": "pooling"}, COMPARED + EMBEDDINGS),
    "clients": Kind(make_demo_model, TOOLS, CLIENTS),
    "reasoning": Kind(make_demo_model, TOOLS | {"reasoning_parser": "qwen3"}, CLIENTS, decided=DECIDED | AT_ONCE),
    "embedding-clients": Kind(make_demo_model, {"runner": "pooling"}, EMBEDDING_CLIENTS),
    "image-clients": Kind(make_vision_model, TOOLS, IMAGE_CLIENTS),
    "audio-clients": Kind(make_listening_model, {}, AUDIO_CLIENTS),
}


def make_drafted(directory: Path) -> None:
    """Make the demo model, and a drafter beside it."""
    make_demo_model(directory)
    make_drafter(directory, directory.parent / "drafter", 3)


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
    make_adapter(directory, directory.parent / "poet", 1)


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
    "windows": Kind(functools.partial(make_model_of, "gemma3"), {}, QUESTIONS),
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


def ask(url: str, path: str, body: Any) -> tuple[int, Any, str]:
    """Return the status, what of the answer is compared, and an error's text."""
    method, _, path = path.rpartition(" ")
    address = url + (path if path.startswith("/") else f"/v1/{path}")
    sent, kind = sent_as(address, body)
    request = urllib.request.Request(address, None if method else sent, {"Content-Type": kind}, method=method or "POST")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        return error.code, "an error", error.read().decode()
    if not kind.startswith("text/event-stream"):
        return status, lasting(json.loads(text)), ""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return status, joined([event if event == "[DONE]" else lasting(json.loads(event)) for event in events]), ""


def sent_as(address: str, body: Any) -> tuple[bytes, str]:
    """Return a body's bytes and their type: a form where there is a file, else JSON."""
    if isinstance(body, str):
        return body.encode(), "application/json"
    if "file" not in body:
        return json.dumps(body).encode(), "application/json"
    words = {name: value for name, value in body.items() if name != "file"}
    form = httpx.Request("POST", address, data=words, files={"file": ("a.wav", body["file"])})
    return form.read(), form.headers["Content-Type"]


def joined(events: list[Any]) -> dict[str, Any]:
    """Return a stream, path by path: the pieces of a text as one, the last usage, of anything else each value once."""
    found: dict[str, Any] = {}
    for event in events:
        for path, value in leaves(event, ""):
            key = path.rsplit(".", 1)[-1]
            if key in PIECES and isinstance(value, str):
                found[path + ", joined"] = found.get(path + ", joined", "") + value
            elif ".usage" in path:
                found[path] = [value]
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
    texts = [f"status {status}\n{json.dumps(body, indent=1, sort_keys=True)}" for status, body in (theirs, ours)]
    return "\n".join(difflib.unified_diff(*(text.splitlines() for text in texts), *SIDES, lineterm="", n=1))


def main() -> int:
    """Ask both servers all questions."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--whole", action="store_true", help="have vLLM make melld's events, too")
    arguments = parser.parse_args()
    program = ("-m", "benchmarks.serving.whole_events" if arguments.whole else "melld")
    counts = {name: compare(KINDS[name], program, show=arguments.show) for name in arguments.kinds or KINDS}
    if arguments.write:
        columns = ["kind", "questions", "same answers", "different as the documents say", "asked"]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        rows = [[name, *map(str, (n.total(), n["same"], n["decided"])), today] for name, n in counts.items()]
        harness.record(TABLE, harness.markdown(columns, rows), "2-core VM", beside=True)
    return int(any(count["DIFFERENT"] for count in counts.values()))


def compare(kind: Kind, program: tuple[str, ...], *, show: bool) -> Counter[str]:
    """Ask both; return how many answers are the same, differ as the documents say, and differ."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "demo"
        kind.make(model)
        options = json.loads(json.dumps(kind.options).replace("DIR", name))
        theirs_alone, ours_alone = ([w.replace("DIR", name) for w in words] for words in (kind.of_vllm, kind.of_melld))
        with (
            vllm_serve(
                model, directory, "--enable-prompt-tokens-details", *flags_for_vllm(options), *theirs_alone
            ) as theirs,
            DaemonProcess(
                model, *CPU.serve_flags(1), *flags_for_melld(options), *ours_alone, program=program
            ) as daemon,
        ):
            ours = daemon.wait_ready().url
            for question, path, body in kind.questions:
                answers = ask(theirs, path, body), ask(ours, path, body)
                found = difference(*(answer[:2] for answer in answers))
                verdict = "same" if not found else "decided" if question in kind.decided else "DIFFERENT"
                counts[verdict] += 1
                print(f"{verdict:9} {answers[1][0]} {question}", flush=True)
                if verdict == "DIFFERENT" or show:
                    tell(found, answers)
    print(f"{counts['same']} of {counts.total()} answers are the same, {counts['decided']} differ as the documents say")
    return counts


def tell(found: str, answers: tuple[tuple[int, Any, str], tuple[int, Any, str]]) -> None:
    """Print the difference, or else the answer; and the text of errors."""
    print(found or json.dumps(answers[1][1], ensure_ascii=False)[:2000], flush=True)
    for side, (_, _, error) in zip(SIDES, answers, strict=True):
        if error:
            print(f"{side}: {error[:600]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
