"""What a prompt of 4,096 tokens does to others, with the step budget and without it.

Two daemons with two real vLLM workers each, measured in turns: one as it is, one whose workers leave the spending of a
step to vLLM.  A step lasts 30 ms and 0.25 ms per prompt token, asleep for what the processor does not need of it: so
the machine's two cores do not decide.  The model is a small one, that they keep up.

    gap   the time between the last chunk from the one worker and the first from the other in a move by KV: to an idle
          worker, and to one that has just got the prompt
    ITL   all times between two chunks of streams on a worker that is given prompts at random
    question, book   the time until the first token of 64 tokens that come when each worker has just begun on a long
          prompt, and of these prompts
"""

import itertools
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import GREEDY, SMALL, paced_environment, parser_of, record, rows_in_markdown
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess

STEP_S, PROMPT_TOKEN_S = 0.03, 0.00025
TODAY = """
from melld.engine.worker.residency.budget import DueTimes, StepBudget
StepBudget._prepare = lambda self: None
DueTimes._line_up = lambda self, request: self._enqueue(request)
"""
Figures = dict[str, Any]


class Served:
    """A daemon whose workers are paced, and the prompts that no cache of it knows."""

    def __init__(self, name: str, model: Path, directory: Path, target_ms: float, change: str = "") -> None:
        environment = paced_environment(directory / name, STEP_S, 0.0, PROMPT_TOKEN_S, change)
        flags = (*SMALL.serve_flags(2), "--set", f"targets.itl_ms={target_ms}")
        self.name = name
        self.daemon = DaemonProcess(model, *flags, environment=environment, genuine=True).wait_ready()
        self.operator = Operator(self.daemon)
        self.operator.wait_linked(self.daemon)
        self._chance = random.Random(name)

    def stream(self, prompt_tokens: int, output_tokens: int) -> Stream:
        """Ask for so many tokens."""
        prompt = [self._chance.randrange(10, 250) for _ in range(prompt_tokens)]
        return Stream(self.daemon, {"prompt": prompt, "max_tokens": output_tokens, **GREEDY})

    def worker_of(self, stream: Stream) -> str:
        """Return where its request is."""
        [one] = self.operator.requests_of(stream)
        return str(one["worker"])


def gap(served: Served, prompt_tokens: int) -> float | None:
    """Move a stream to the other worker, beside a prompt of so many tokens or, with 0, none; return its pause.

    None if the prompt was over when the pause began: the move came too late to say anything.
    """
    stream = served.stream(256, 4000)
    stream.wait_chunks(40)
    if prompt_tokens:  # it goes to the worker with more room, the other one
        prompt = served.stream(prompt_tokens, 2)
        served.operator.wait_request(lambda one: one["worker"] and one["phase"] != "decoding")
    [report] = served.operator.move(stream, "kv")
    ended_s = time.monotonic()
    assert report["outcome"] == "committed", report
    if prompt_tokens:
        prompt.result()
    stream.wait_chunks(len(stream.arrivals_s) + 10)
    stream.leave()
    stream.join()
    served.operator.wait_idle()
    return None if prompt_tokens and prompt.arrivals_s[0] < ended_s - report["gap_s"] else float(report["gap_s"])


def question(served: Served, book_tokens: int) -> tuple[float, float]:
    """Return the TTFT of a question beside books, and the mean one of these."""
    asked_s = time.monotonic()
    books = [served.stream(book_tokens, 2) for _ in range(2)]
    served.operator.wait(lambda status: [one["phase"] for one in status["requests"]] == ["prefilling"] * 2, 30.0)
    question_s = time.monotonic()
    asked = served.stream(64, 2)
    for stream in (asked, *books):
        stream.result()
    served.operator.wait_idle()
    return asked.arrivals_s[0] - question_s, statistics.fmean(book.arrivals_s[0] - asked_s for book in books)


def itls(served: Served, seconds: float, prompt_tokens: int, rate: float, seed: int) -> tuple[list[float], list[float]]:
    """Return the times between the chunks of eight streams beside prompts at random, and those prompts' TTFTs."""
    chance = random.Random(seed)
    streams = [served.stream(64, 20_000) for _ in range(8)]
    for stream in streams:
        stream.wait_chunks(10)
    began_s, prompts, asked_s = time.monotonic(), [], []
    next_s = began_s
    while (next_s := next_s + chance.expovariate(rate)) < began_s + seconds:
        time.sleep(max(0.0, next_s - time.monotonic()))
        asked_s.append(time.monotonic())
        prompts.append(served.stream(prompt_tokens, 2))
    for prompt in prompts:
        prompt.result()
    ended_s = time.monotonic()
    for stream in streams:
        stream.leave()
    for stream in streams:
        stream.join()
    served.operator.wait_idle()
    found = [
        after - before
        for stream in streams
        for before, after in itertools.pairwise(stream.arrivals_s)
        if began_s < before and after < ended_s
    ]
    return found, [prompt.arrivals_s[0] - at_s for prompt, at_s in zip(prompts, asked_s, strict=True)]


def main() -> int:
    """Measure in turns, and print a row of figures at a time."""
    parser = parser_of(__doc__)
    parser.add_argument("--moves", type=int, default=15, help="of each kind")
    parser.add_argument("--beside", type=int, nargs="+", default=[4096, 16384], help="tokens of prompts to move beside")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--rate", type=float, default=0.4, help="prompts a second in a window")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--target-ms", type=float, default=60.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model, directory = Path(name) / "model", Path(name)
        SMALL.make_model(model)
        both = [
            Served("budget", model, directory, asked.target_ms),
            Served("today", model, directory, asked.target_ms, TODAY),
        ]
        for served in both:
            stack.callback(served.daemon.stop)
            itls(served, 5.0, asked.prompt_tokens, 1.0, 0)  # learns what its steps cost
        latencies: dict[tuple[str, str], list[float]] = {}
        for window in range(asked.windows):
            for served in both[:: 1 - 2 * (window % 2)]:
                found, ttfts = itls(served, asked.seconds, asked.prompt_tokens, asked.rate, window + 1)
                latencies.setdefault((served.name, "ITL"), []).extend(found)
                latencies.setdefault((served.name, "TTFT"), []).extend(ttfts)
        for _, served in itertools.product(range(asked.questions), both):
            for of, found_s in zip(("question", "book"), question(served, asked.beside[-1]), strict=True):
                latencies.setdefault((served.name, of), []).append(found_s)
        for _, served, tokens in itertools.product(range(asked.moves), both, (0, *asked.beside)):
            if (pause := gap(served, tokens)) is not None:
                latencies.setdefault((served.name, f"gap beside {tokens} tokens"), []).append(pause)
    rows = [{"way": way, "of": of} | figures(values) for (way, of), values in latencies.items()]
    print(rows_in_markdown(rows))
    if asked.write:
        record("step-budget", rows_in_markdown(rows), "two CPU cores")
    return 0


def figures(values_s: list[float]) -> Figures:
    """Count, median, middle half, 99th percentile and maximum, in milliseconds."""
    low, middle, high = statistics.quantiles(values_s, n=4)
    p99 = statistics.quantiles(values_s, n=100, method="inclusive")[98]
    named = {"p25": low, "median": middle, "p75": high, "p99": p99, "longest": max(values_s)}
    return {"count": len(values_s)} | {f"{key}_ms": round(value * 1e3, 1) for key, value in named.items()}


if __name__ == "__main__":
    sys.exit(main())
