"""One tiny model of each family, served by melld and run by vLLM: which answers are the same, come what may?

    python -m benchmarks.serving.families [FAMILY...] [--without-vllm] [--write]

Two CPU workers each; greedy, seeded and penalised answers, or numbers of models that pool.  They are asked in peace,
moved by KV, moved by tokens, and asked while a worker is killed; and of vLLM's own engine, with its prefix cache and
without.  Its CPU build gets melld's mends: else it writes wrong text for some families, and none for others.  Rows that
are written replace those of the same families.
"""

import functools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks import harness
from benchmarks.harness import CPU
from benchmarks.serving.answers_vs_vllm import flags_for_melld
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.families.every import FAMILIES, WITHOUT_CPU, make_model_of
from tests.families.images import IMAGES
from tests.forked import run_python
from tests.migrate.live import CASES, Answer, Bench, Stream, alike, linked_workers
from tests.serve.daemon_process import DaemonProcess

NAMES = ("greedy", "seeded", "penalties")
DRAFTED_NAMES = ("greedy", "penalties", "json_schema")
"""Asked of families with a drafter, all of them greedily: what chance decides depends on the guesses, too."""
TEXTS = ["The old lighthouse and its keeper.", "A table.", "Tell me the story of the sea. " * 8]
ROUNDING = 1e-4
"""Of numbers: those of several texts in a step differ in the last digits."""
SPREAD = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
FLAGS = ("--kv-bytes", "192MiB", "--set", "health.steady_after_s=0")
OFFLINE = """
import json, sys
from melld.engine.worker.vllm_on_cpu.mends import mend
mend()
from benchmarks.serving.families import offline
print(json.dumps(offline(**json.loads(sys.argv[1]))))
"""
COLUMNS = ["family", "served", "by KV", "by tokens", "after kill -9", "as vLLM", "without its prefix cache"]


class Prompted(Bench):
    """A daemon that is asked for completions: a family's way with chats is not tried here."""

    def __init__(self, daemon: DaemonProcess, bodies: dict[str, dict[str, Any]]) -> None:
        super().__init__(daemon, daemon.faults)
        self.bodies = bodies

    def body(self, name: str) -> dict[str, Any]:
        """Return the case without a chat."""
        return self.bodies[name]


def bodies_for(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is asked of a family with these options, by the names of the cases."""
    drafts = "speculative_config" in options
    own = {"prompt": TEXTS[2] * 8, "max_tokens": 200} | ({"temperature": 0} if drafts else {})
    return {
        name: {key: value for key, value in CASES[name].items() if key != "messages"} | own
        for name in (DRAFTED_NAMES if drafts else NAMES)
    }


def whole(answer: Answer) -> Any:
    """Return an answer's text and how it ended, unless it is an error."""
    if answer.error is not None:
        raise RuntimeError(f"an error: {answer.error}")
    return [answer.choices[0].text, answer.choices[0].finish]


def same(found: bool) -> str:
    """Return a verdict."""
    return "same" if found else "DIFFERENT"


def texts_of(bench: Prompted, how: Callable[[Stream], None] | None = None) -> list[Any]:
    """Return the answers; `how`: what happens to each stream meanwhile."""
    if how is None:
        return [whole(bench.unmoved(name)) for name in bench.bodies]
    with bench.slowed():
        streams = [bench.stream(name) for name in bench.bodies]
        for stream in streams:
            how(stream)
    answers = [whole(stream.result()) for stream in streams]
    bench.operator.wait_ready()
    bench.operator.wait_idle()
    return answers


def moved(bench: Prompted, via: str) -> str:
    """Move each answer once; say whether all did, and are as they were."""
    outcomes: list[str] = []
    answers = texts_of(
        bench, lambda stream: outcomes.extend(one["outcome"] for one in bench.operator.move(stream, via))
    )
    if outcomes != ["committed"] * len(bench.bodies):
        return ", ".join(outcomes) or "not moved"
    return same(answers == texts_of(bench))


def kill_one(bench: Bench) -> None:
    """Kill a worker that has a request."""
    workers = bench.operator.status()["workers"]
    worker = next((one for one in workers if one["used_blocks"]), workers[0])
    os.kill(int(worker["pid"]), signal.SIGKILL)
    bench.operator.wait_gone(worker["worker"], int(worker["pid"]))


def numbers_of(url: str, name: str, model: str = "demo") -> list[Any]:
    """Return what a model that pools, of the family of this name, answers."""
    pairs = {"query": TEXTS[0], "documents": TEXTS[1:]}
    asked = ("/rerank", pairs) if "reranker" in name else ("/v1/embeddings", {"input": TEXTS})
    path, body = ("/pooling", {"input": TEXTS}) if "tagger" in name else asked
    answer = httpx.post(url + path, json={"model": model, **body}, timeout=300)
    answer.raise_for_status()
    found = answer.json()
    rows = found.get("data") or sorted(found["results"], key=lambda row: row["index"])
    return [row.get("embedding", row.get("relevance_score", row.get("data"))) for row in rows]


def of_daemon(name: str, model: Path, options: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the family's answers, and what became of them."""
    flags = (*FLAGS, *flags_for_melld(options))
    if "runner" in options:
        with DaemonProcess(model, "--device", "cpu:2", *SPREAD, *flags) as daemon:
            numbers = numbers_of(daemon.wait_ready().url, name)
            kill_one(Bench(daemon, daemon.faults))
            return numbers, ["yes", "-", "-", same(alike(numbers, numbers_of(daemon.url, name), ROUNDING))]
    with linked_workers(model, *flags) as daemon:
        bench = Prompted(daemon, bodies_for(options))
        found = [moved(bench, via) for via in ("kv", "tokens")]
        first = functools.cache(lambda: kill_one(bench))
        killed = texts_of(bench, lambda _stream: first())
        return texts_of(bench), ["yes", *found, same(killed == texts_of(bench))]


def of_vllm(name: str, model: Path, options: dict[str, Any], *, prefix_caching: bool) -> list[Any]:
    """Return the answers of vLLM's own engine, in a process of its own."""
    cached = {} if "runner" in options else {"enable_prefix_caching": prefix_caching}
    told = {"name": name, "model": str(model), "options": options | cached}
    environment = os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT
    ended = run_python("-c", OFFLINE, json.dumps(told), env=environment)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])
    answers: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return answers


def offline(name: str, model: str, options: dict[str, Any]) -> list[Any]:
    """Return the answers of vLLM's engine in this process."""
    from vllm import LLM
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    engine = LLM(model, **{**CPU.engine, "kv_cache_memory_bytes": CPU.kv_bytes, **options})
    if "reranker" in name:
        return [one.outputs.score for one in engine.score(TEXTS[0], TEXTS[1:])]
    if "runner" in options:
        task = "token_classify" if "tagger" in name else "embed"
        return [one.outputs.data.tolist() for one in engine.encode(TEXTS, pooling_task=task)]
    answers = []
    for body in bodies_for(options).values():
        asked = CompletionRequest(**body)
        [answer] = engine.generate(asked.prompt, asked.to_sampling_params(asked.max_tokens, {}))
        answers.append([answer.outputs[0].text, answer.outputs[0].finish_reason])
    return answers


def row_of(name: str, *, with_vllm: bool) -> list[str]:
    """Try one family; return its row of the table."""
    if name in WITHOUT_CPU:
        return [name, WITHOUT_CPU[name], *["-"] * 5]
    options = dict((FAMILIES | IMAGES)[name].options)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "demo"
        make_model_of(name, model)
        try:
            answers, found = of_daemon(name, model, options)
        except Exception as error:  # noqa: BLE001  the others are tried all the same
            traceback.print_exc()
            return [name, f"no: {type(error).__name__}", *["-"] * 5]
        caching = (True,) if "runner" in options else (True, False)  # one that pools has what vLLM gives it
        for prefix_caching in caching if with_vllm else ():
            try:
                theirs = of_vllm(name, model, options, prefix_caching=prefix_caching)
                found.append(same(alike(theirs, answers, ROUNDING) if "runner" in options else theirs == answers))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                found.append("does not serve it")
    return [name, *found, *["-"] * (len(COLUMNS) - 1 - len(found))]


def main() -> int:
    """Print the table; return 1 where an answer is another."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM's own engine out")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    print(*lines, sep="\n", flush=True)
    for name in arguments.families:
        lines.append(f"| {' | '.join(row_of(name, with_vllm=not arguments.without_vllm))} |")
        print(lines[-1], flush=True)
    if arguments.write:
        harness.record("families", "\n".join(lines), "2-core VM", beside=True)
    return int(any("DIFFERENT" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
