"""How long the second token waits when a request is handed over after its first one.

A daemon with two real vLLM workers.  Prompts of several chunks are asked for in turns: one is handed over while it is
computed, to an idle worker; one to a worker where streams decode; one stays.  A step lasts 30 ms and 0.25 ms per prompt
token, asleep for what the processor does not need of it.

    wait    the time between the client's first token and its second
    step    the mean time between two tokens from the third on, of the same stream
"""

import itertools
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import GREEDY, SMALL, markdown, paced_environment, parser_of, record
from benchmarks.moves.step_budget import PROMPT_TOKEN_S, STEP_S
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess

CHUNK_TOKENS, AFTER = 256, 24
IDLE, BUSY = "an idle worker", "one where streams decode"
COLUMNS = ["prompt tokens", "to", "wait over step: median (middle half; longest)", "wait", "step", "runs"]
Found = list[tuple[float, float]]


class Bench:
    """A daemon whose workers are paced, and prompts that no cache of it knows."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.operator = Operator(daemon)
        self.operator.wait_linked(daemon)
        self._daemon = daemon
        self._chance = random.Random(3)

    def stream(self, prompt_tokens: int, output_tokens: int) -> Stream:
        """Ask for so many tokens."""
        prompt = [self._chance.randrange(10, 250) for _ in range(prompt_tokens)]
        return Stream(self._daemon, {"prompt": prompt, "max_tokens": output_tokens, **GREEDY})

    def neighbours(self, count: int) -> list[Stream]:
        """Have so many streams decode on the second worker, and nothing on the first."""
        streams = [self.stream(64, 20_000) for _ in range(count)]
        for stream in streams:
            stream.wait_chunks(3)
            [one] = self.operator.requests_of(stream)
            self.operator.migrate(one["request"], "w1", None)
        return streams

    def wait(self, prompt_tokens: int, moved: bool) -> tuple[float, float, Any]:
        """Return the wait and the step of one stream, in seconds, and the report of its move."""
        known = {one["request"] for one in self.operator.status()["requests"]}
        stream, report = self.stream(prompt_tokens, AFTER), None
        if moved:
            one = self.operator.wait_request(lambda one: one["request"] not in known and one["worker"])
            there = "w1" if one["worker"] == "w0" else "w0"
            report = self.operator.migrate(one["request"], there, None, after_first_token=True)
        stream.result()
        waits = [after - before for before, after in itertools.pairwise(stream.arrivals_s)][: AFTER - 1]
        return waits[0], statistics.fmean(waits[1:]), report


def is_followed(report: Any) -> bool:
    """Return True if the request was frozen between its first token and the next."""
    story = [line.split(" ms ", 1)[1] for line in report["story"]]
    return report["outcome"] == "committed" and story[-4:-2] == ["first token awaited", "frozen"]


def row(tokens: int, way: str, found: list[tuple[float, float]]) -> list[str]:
    """Lay out the ratios of waits to steps, and the medians of both."""
    ratios = [wait_s / step_s for wait_s, step_s in found]
    low, middle, high = statistics.quantiles(ratios, n=4)
    wait_ms, step_ms = (statistics.median(values) * 1e3 for values in zip(*found, strict=True))
    spread = f"{middle:.2f} ({low:.2f} to {high:.2f}; {max(ratios):.2f})"
    return [f"{tokens:,}", way, spread, f"{wait_ms:.1f} ms", f"{step_ms:.1f} ms", str(len(found))]


def measure(bench: Bench, prompts: list[int], turns: int, neighbours: int) -> dict[tuple[int, str], Found]:
    """Hand over, and leave where they are, so many of each kind in turns, beside so many streams on the one worker."""
    streams, found = bench.neighbours(neighbours), {}
    there = BUSY if neighbours else IDLE
    for turn, tokens, moved in itertools.product(range(turns + 1), prompts, (True, False)):
        wait_s, step_s, report = bench.wait(tokens, moved)
        if not turn:  # learns what its steps cost
            continue
        if report is not None and not is_followed(report):
            print(json.dumps({"not followed": tokens, "to": there, "story": report["story"]}), flush=True)
            continue
        found.setdefault((tokens, there if moved else f"stays; {there}"), []).append((wait_s, step_s))
    for stream in streams:
        stream.leave()
    for stream in streams:
        stream.join()
    bench.operator.wait_idle()
    return found


def main() -> int:
    """Measure, print a row of figures at a time, and record them where that is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--moves", type=int, default=12, help="of each kind")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens")
    parser.add_argument("--neighbours", type=int, default=4, help="streams on a busy worker")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        SMALL.make_model(Path(name) / "model")
        environment = paced_environment(Path(name) / "paced", STEP_S, 0.0, PROMPT_TOKEN_S)
        flags = (*SMALL.serve_flags(2), "--set", f"model.vllm.max_num_batched_tokens={CHUNK_TOKENS}")
        daemon = DaemonProcess(Path(name) / "model", *flags, environment=environment, genuine=True)
        stack.callback(daemon.stop)
        bench = Bench(daemon.wait_ready())
        found = measure(bench, asked.prompts, asked.moves, 0)
        found |= measure(bench, asked.prompts, asked.moves, asked.neighbours)
    rows = [row(tokens, way, values) for (tokens, way), values in found.items()]
    for cells in rows:
        print(" | ".join(cells), flush=True)
    if asked.write:
        record("hand-over", markdown(COLUMNS, rows), "two CPU cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
