"""melld against `vllm serve`: the same model, arguments, threads and load, in turns, in one run.

    .venv/bin/python -m benchmarks.serving.serve_vs_vllm [--rounds 3] [--output FILE.json] [--write NAME]

The load is `vllm bench serve`, vLLM's own client.  Both servers are up for the whole run and only one is asked at a
time, A B A B ...; printed are ratios melld / vLLM of each pair's figures, as median (min .. max).  A ratio above 1
is good for throughput and bad for TTFT and ITL.  `--device cuda`: on one GPU, a model of a usual size; melld's KV
and vLLM's both lie on it.  `--before DIR`: another version of melld, in this directory, in the place of vLLM.
`--write`: the ratios, to benchmarks/results.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from benchmarks import harness
from benchmarks.harness import CPU, SETTINGS, Setting
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.serve.daemon_process import DaemonProcess

PROMPTS = {1: 12, 16: 64, 64: 192}
FIGURES = {"output_throughput": "output tokens/s", "median_ttft_ms": "median TTFT", "median_itl_ms": "median ITL"}
PROCESSOR = "processor time a token"
ELSEWHERE = """
import os, sys
os.chdir({0!r})
os.environ["PYTHONPATH"] = {0!r}
os.execv(sys.executable, [sys.executable, "-m", "melld", *sys.argv[1:]])
"""
"""What starts the melld of another directory: a worker imports from where it is."""


class Load(NamedTuple):
    """What one run of the client sends."""

    concurrency: int
    prompts: int
    tokens_in: int
    tokens_out: int


def environment(directory: Path, setting: Setting = CPU) -> dict[str, str]:
    """Return the environment for vLLM's command line: with its CPU build it looks for a package named `vllm`."""
    own = {key: value for key, value in COMMON_ENVIRONMENT.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    own["VLLM_LOGGING_LEVEL"] = "WARNING"
    if setting.kind == "cuda":
        return os.environ | own
    metadata = directory / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    python_path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return os.environ | own | CPU_ENVIRONMENT | {"PYTHONPATH": python_path}


@contextlib.contextmanager
def vllm_serve(model: Path, directory: Path, *more: str, setting: Setting = CPU) -> Iterator[str]:
    """`vllm serve` with the same words, and `more`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
    words += ["--served-model-name", "demo", *setting.vllm_words(), "--disable-uvicorn-access-log", *more]
    with (directory / "vllm.log").open("w") as log:
        process = subprocess.Popen(words, env=environment(directory, setting), stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline_s = time.monotonic() + 240
            while not answers(url + "/health"):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"vllm serve did not start:\n{(directory / 'vllm.log').read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    """Return True if there is a 200 at `url`."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Client:
    """`vllm bench serve`, vLLM's own client, in one process for all of its runs: else it mostly imports."""

    PROGRAM = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("done", flush=True)
"""

    def __init__(self, model: Path, directory: Path, setting: Setting = CPU) -> None:
        self._model, self._directory, self._log = model, directory, directory / "client.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM],
                env=environment(directory, setting),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def bench(self, url: str, load: Load, seed: int) -> dict[str, float]:
        """Play a load once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        result = self._directory / "result.json"
        words = ["--backend", "openai", "--base-url", url, "--model", "demo", "--tokenizer", str(self._model)]
        words += ["--dataset-name", "random", "--random-input-len", str(load.tokens_in), "--ignore-eos"]
        words += ["--random-output-len", str(load.tokens_out), "--num-prompts", str(load.prompts)]
        words += ["--max-concurrency", str(load.concurrency), "--seed", str(seed), "--disable-tqdm"]
        words += ["--save-result", "--result-dir", str(self._directory), "--result-filename", result.name]
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        if "done\n" not in self._process.stdout:  # reads up to it
            raise SystemExit(f"the client ended:\n{self._log.read_text()[-3000:]}")
        figures = json.loads(result.read_text())
        if figures["completed"] != load.prompts:
            raise SystemExit(f"{url}: {figures['completed']} of {load.prompts} requests completed")
        return {key: float(figures[key]) for key in FIGURES}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def ratios(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, list[float]]:
    """melld / vLLM, pair by pair."""
    return {key: [ours[key] / theirs[key] for ours, theirs in pairs] for key in FIGURES}


def event_loop_delay(url: str) -> float:
    """Return the longest that melld's loop was late, in seconds, since it was last asked."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return max(float(line.split()[1]) for line in lines if line.startswith("melld_event_loop_delay_max_seconds "))


@contextlib.contextmanager
def melld_before(directory: Path, model: Path, *flags: str) -> Iterator[DaemonProcess]:
    """`melld serve` of another version."""
    program = ("-c", ELSEWHERE.format(str(directory.resolve())))
    with DaemonProcess(model, *flags, program=program, genuine=True) as process:
        yield process.wait_ready()


def processor_s(pid: int) -> float:
    """Return the processor time of a process and of those that it has started, so far."""
    main = psutil.Process(pid)
    times = [one.cpu_times() for one in (main, *main.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def compare(pids: tuple[int, int], urls: tuple[str, str], client: Client, load: Load, rounds: int) -> None:
    """Measure two versions of melld in turns; print the ratios, of what their processors take too."""
    for url in urls:
        client.bench(url, load, 1000)
    pairs = []
    for seed in range(rounds):
        both = []
        for pid, url in zip(pids, urls, strict=True):
            began_s = processor_s(pid)
            figures = client.bench(url, load, seed)
            both.append(figures | {PROCESSOR: (processor_s(pid) - began_s) / (load.prompts * load.tokens_out)})
        pairs.append(both)
    for key in (*FIGURES, PROCESSOR):
        values = [ours[key] / before[key] for ours, before in pairs]
        medians = [statistics.median(pair[side][key] for pair in pairs) for side in (0, 1)]
        print(json.dumps({"streams": load.concurrency, "figure": FIGURES.get(key, key), "now, before": medians}))
        print(f"  {statistics.median(values):.3f} ({min(values):.3f} .. {max(values):.3f})", flush=True)


def measure(urls: tuple[str, str], client: Client, load: Load, rounds: int) -> dict[str, Any]:
    """Measure both servers in turns under one load, each warmed up; print and return the facts."""
    ours, theirs = urls
    for url in urls:
        client.bench(url, load, 1000)
    pairs = [(client.bench(ours, load, seed), client.bench(theirs, load, seed)) for seed in range(rounds)]
    for key, values in ratios(pairs).items():
        medians = [statistics.median(pair[side][key] for pair in pairs) for side in (0, 1)]
        spread = {"ratio": statistics.median(values), "lowest": min(values), "highest": max(values)}
        row = {"melld": medians[0], "vllm": medians[1], **spread}
        rounded = {name: round(value, 3) for name, value in row.items()}
        print(json.dumps({"streams": load.concurrency, "figure": FIGURES[key], **rounded}), flush=True)
    return {**load._asdict(), "pairs": pairs, "loop_delay_max_s": event_loop_delay(ours)}


def write(arguments: argparse.Namespace, report: list[dict[str, Any]]) -> None:
    """Record the ratios of each load, as median (lowest .. highest)."""
    columns = ["workers", "concurrency", "prompts", "tokens in", "tokens out", "pairs", *FIGURES.values()]
    rows = []
    for facts in report:
        each = [f"{statistics.median(v):.2f} ({min(v):.2f} .. {max(v):.2f})" for v in ratios(facts["pairs"]).values()]
        said = [facts[key] for key in ("workers", *Load._fields)]
        rows.append([*map(str, (*said, len(facts["pairs"]))), *each])
    name = "serving-tensor-parallel" if arguments.per_worker > 1 else "serving-vs-vllm"
    name = "serving-gpu" if arguments.device == "cuda" else name
    harness.record(name, harness.markdown(columns, rows), "2-core VM")


def main() -> None:
    """Start both, compare, print."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(PROMPTS))
    parser.add_argument("--prompts", type=int, nargs="+", help="of each concurrency; default: as many as usual")
    parser.add_argument("--tokens", type=int, nargs=2, default=[200, 100], metavar=("IN", "OUT"))
    parser.add_argument("--per-worker", type=int, default=1, help="devices of a worker: tensor parallelism in both")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another version of melld, in the place of vLLM")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = []
    setting = SETTINGS[arguments.device]
    prompts = arguments.prompts or [PROMPTS[streams] for streams in arguments.concurrency]
    loads = [Load(*pair, *arguments.tokens) for pair in zip(arguments.concurrency, prompts, strict=True)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "demo"
        setting.make_model(model)
        each = arguments.per_worker
        if arguments.before:
            flags = setting.serve_flags(1)
            with (
                Client(model, directory, setting) as client,
                melld_before(arguments.before, model, *flags) as before,
                DaemonProcess(model, *flags, genuine=True) as process,
            ):
                process.wait_ready()
                pids, urls = (process.process.pid, before.process.pid), (process.url, before.url)
                for load in loads:
                    compare(pids, urls, client, load, arguments.rounds)
            return
        more = ("--tensor-parallel-size", str(each)) if each > 1 else ()
        with (
            Client(model, directory, setting) as client,
            vllm_serve(model, directory, *more, setting=setting) as theirs,
        ):
            for workers in arguments.workers:
                flags = (*setting.serve_flags(workers * each), "--set", f"devices.per_worker={each}")
                with DaemonProcess(model, *flags, genuine=True) as process:
                    ours = process.wait_ready().url
                    for load in loads:
                        print(f"{workers} worker(s), {load}", flush=True)
                        facts = measure((ours, theirs), client, load, arguments.rounds)
                        print(f"  melld's event loop was late by at most {facts['loop_delay_max_s'] * 1e3:.0f} ms")
                        report.append({"workers": workers} | facts)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1))
    if arguments.write:
        write(arguments, report)


if __name__ == "__main__":
    main()
