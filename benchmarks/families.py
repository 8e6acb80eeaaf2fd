"""One tiny model of each family, served by melld and by `vllm serve`: which answers are the same, come what may?

    PYTHONPATH=. .venv/bin/python benchmarks/families.py [FAMILY...] [--without-vllm] [--write]

Two CPU workers each; greedy, seeded and penalised answers, or numbers of models that pool.  They are asked in peace,
moved by KV, moved by tokens, and asked while a worker is killed; and of `vllm serve`, with its prefix cache and
without.  Its CPU build gets melld's mends: else it writes wrong text for some families, and none for others.
"""

import argparse
import functools
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from benchmarks import tables
from benchmarks.answers_vs_vllm import flags_for_melld, flags_for_vllm
from benchmarks.serve_vs_vllm import vllm_serve
from tests.families.every import FAMILIES, WITHOUT_CPU, make_model_of
from tests.migrate.live import CASES, Answer, Bench, Stream, alike, linked_workers
from tests.serve.daemon_process import DaemonProcess

NAMES = ("greedy", "seeded", "penalties")
TEXTS = ["The old lighthouse and its keeper.", "A table.", "Tell me the story of the sea. " * 8]
ROUNDING = 1e-4
"""Of numbers: those of several texts in a step differ in the last digits."""
SPREAD = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
FLAGS = ("--kv-bytes", "192MiB", "--set", "health.steady_after_s=0")
MENDS = "[vllm.general_plugins]\nmend = melld.engine.worker.vllm_on_cpu.mends:mend\n"
"""What an installed plugin of vLLM says of itself; vLLM calls it in each of its processes."""
COLUMNS = ["family", "served", "by KV", "by tokens", "after kill -9", "as vllm serve", "without its prefix cache"]


class Prompted(Bench):
    """A daemon that is asked for completions: a family's way with chats is not tried here."""

    names: tuple[str, ...] = NAMES
    """With a drafter what chance decides depends on its guesses, too: greedy answers alone."""

    def body(self, name: str) -> dict[str, Any]:
        """Return the case without a chat."""
        return body_of(name)


def names_for(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the cases of a family with these options."""
    return NAMES[:1] if "speculative_config" in options else NAMES


def body_of(name: str) -> dict[str, Any]:
    """Return what is asked in this case."""
    return {key: value for key, value in CASES[name].items() if key != "messages"} | {
        "prompt": TEXTS[2] * 8,
        "max_tokens": 200,
    }


def whole(answer: Answer) -> Any:
    """Return the choices of an answer that is no error."""
    if answer.error is not None:
        raise RuntimeError(f"an error: {answer.error}")
    return answer.choices


def same(found: bool) -> str:
    """Return a verdict."""
    return "same" if found else "DIFFERENT"


def texts_of(bench: Prompted, how: Callable[[Stream], None] | None = None) -> list[Any]:
    """Return the answers; `how`: what happens to each stream meanwhile."""
    if how is None:
        return [whole(bench.unmoved(name)) for name in bench.names]
    with bench.slowed():
        streams = [bench.stream(name) for name in bench.names]
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
    if outcomes != ["committed"] * len(bench.names):
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
        bench = Prompted(daemon, daemon.faults)
        bench.names = names_for(options)
        found = [moved(bench, via) for via in ("kv", "tokens")]
        first = functools.cache(lambda: kill_one(bench))
        killed = texts_of(bench, lambda _stream: first())
        return texts_of(bench), ["yes", *found, same(killed == texts_of(bench))]


def of_vllm(name: str, model: Path, options: dict[str, Any], *more: str) -> list[Any]:
    """Return the answers of `vllm serve`."""
    with tempfile.TemporaryDirectory() as directory:
        plugin = Path(directory) / "mends-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: mends\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(MENDS)
        with vllm_serve(model, Path(directory), *flags_for_vllm(options), *more) as url:
            if "runner" in options:
                return numbers_of(url, name)
            server: Any = SimpleNamespace(url=url)
            return [whole(Stream(server, body_of(name)).result()) for name in names_for(options)]


def row_of(name: str, *, with_vllm: bool) -> list[str]:
    """Try one family; return its row of the table."""
    if name in WITHOUT_CPU:
        return [name, WITHOUT_CPU[name], *["-"] * 5]
    options = dict(FAMILIES[name].options)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "demo"
        make_model_of(name, model)
        try:
            answers, found = of_daemon(name, model, options)
        except Exception as error:  # noqa: BLE001  the others are tried all the same
            traceback.print_exc()
            return [name, f"no: {type(error).__name__}", *["-"] * 5]
        for more in ([], ["--no-enable-prefix-caching"]) if with_vllm else ():
            try:
                theirs = of_vllm(name, model, options, *more)
                found.append(same(alike(theirs, answers, ROUNDING) if "runner" in options else theirs == answers))
            except (SystemExit, httpx.HTTPError) as error:
                print(error, file=sys.stderr)
                found.append("does not serve it")
    return [name, *found, *["-"] * (len(COLUMNS) - 1 - len(found))]


def main() -> int:
    """Print the table; return 1 where an answer is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--without-vllm", action="store_true", help="leave `vllm serve` out")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    print(*lines, sep="\n", flush=True)
    for name in arguments.families:
        lines.append(f"| {' | '.join(row_of(name, with_vllm=not arguments.without_vllm))} |")
        print(lines[-1], flush=True)
    if arguments.write:
        tables.record(tables.RESULTS, "families", "\n".join(lines), machine="2-core VM")
    return int(any("DIFFERENT" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
