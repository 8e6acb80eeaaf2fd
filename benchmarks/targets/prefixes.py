"""What placing by prefixes saves, and what it costs where nothing is shared.

Two daemons with two real vLLM workers each, one that places by prefixes and one that does not, in turns.  A step lasts
30 ms, 3 ms per request that decodes and 0.25 ms per prompt token, asleep for what the processor does not need of it.
With a target of 50 ms eight chats need both workers.

    chats    eight, begun within ten seconds, of six turns: 2,048 tokens in common, and in each turn 64 of the user and
             192 of the model; prompt tokens that workers computed (vLLM's queries of the prefix cache less its hits)
    nothing  prompts of 512 random tokens, at random: the time until their first token
"""

import random
import re
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import GREEDY, SMALL, markdown, paced_environment, parser_of, record
from tests.api.http_client import COMPLETIONS, request
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess

STEP_S, DECODE_S, PROMPT_TOKEN_S = 0.03, 0.003, 0.00025
CHATS, TURNS, COMMON, SAID, ANSWERED = 8, 6, 2048, 64, 192
COUNT = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (.*)$", re.MULTILINE)


class Subject:
    """One of the two daemons."""

    def __init__(self, name: str, model: Path, directory: Path, *, aware: bool) -> None:
        self.name = name
        flags = [
            "--set",
            'scheduler.policy="mell-slo"',
            "--set",
            "targets.itl_ms=50",
            "--set",
            f"scheduler.prefix_aware={str(aware).lower()}",
        ]
        environment = paced_environment(directory / name, STEP_S, DECODE_S, PROMPT_TOKEN_S)
        self.daemon = DaemonProcess(model, *SMALL.serve_flags(2), *flags, environment=environment, genuine=True)
        self.daemon.wait_ready()
        Operator(self.daemon).wait_linked(self.daemon)

    def computed_tokens(self) -> float:
        """Return how many prompt tokens the workers have computed so far."""
        counts = {"queries": 0.0, "hits": 0.0}
        for what, count in COUNT.findall(self.daemon.get("/metrics")):
            counts[what] += float(count)
        return counts["queries"] - counts["hits"]


def tokens(chance: random.Random, count: int) -> list[int]:
    """Return so many random tokens."""
    return [chance.randrange(10, 250) for _ in range(count)]


def chat(subject: Subject, beginning: list[int], chance: random.Random) -> None:
    """Have one conversation, reading and thinking for some seconds between its turns."""
    time.sleep(chance.uniform(0.0, 10.0))
    said = list(beginning)
    for _ in range(TURNS):
        said += tokens(chance, SAID)
        body = {"model": "demo", "prompt": said, "max_tokens": ANSWERED, "return_token_ids": True, **GREEDY}
        answered = request(subject.daemon.url, "POST", COMPLETIONS, body)
        assert answered.status == 200, answered.body
        said += answered.json()["choices"][0]["token_ids"]
        time.sleep(chance.uniform(1.0, 6.0))


def chats(subject: Subject, seed: int) -> float:
    """Return the prompt tokens that eight conversations cost."""
    before = subject.computed_tokens()
    beginning = tokens(random.Random(f"{seed} common"), COMMON)
    threads = [
        threading.Thread(target=chat, args=(subject, beginning, random.Random(f"{seed} {number}")))
        for number in range(CHATS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Operator(subject.daemon).wait_idle()
    return subject.computed_tokens() - before


def nothing_shared(subject: Subject, seed: int, seconds: float) -> float:
    """Return the mean time until the first token of prompts that have nothing in common."""
    chance, streams, asked_s = random.Random(seed), [], []
    next_s = began_s = time.monotonic()
    while (next_s := next_s + chance.expovariate(2.0)) < began_s + seconds:
        time.sleep(max(0.0, next_s - time.monotonic()))
        asked_s.append(time.monotonic())
        streams.append(Stream(subject.daemon, {"prompt": tokens(chance, 512), "max_tokens": 32, **GREEDY}))
    for stream in streams:
        stream.result()
    return statistics.fmean(one.arrivals_s[0] - at_s for one, at_s in zip(streams, asked_s, strict=True))


def main() -> int:
    """Measure both daemons in turns; print the ratios, aware over blind."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of prompts that share nothing, in a round")
    arguments = parser.parse_args()

    def nothing(subject: Subject, seed: int) -> float:
        return nothing_shared(subject, seed, arguments.seconds)

    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = Path(scratch) / "model"
        SMALL.make_model(model)
        both = [Subject(name, model, Path(scratch), aware=name == "aware") for name in ("aware", "blind")]
        for one in both:
            stack.callback(one.daemon.stop)
            nothing_shared(one, -1, arguments.seconds)  # learns what steps and prompts take
        for what, measure in (("seconds to the first token", nothing), ("prompt tokens computed", chats)):
            for number in range(arguments.rounds):
                for one in both if number % 2 else both[::-1]:
                    found.setdefault((what, one.name), []).append(measure(one, number))
                    print(what, one.name, found[what, one.name][-1], file=sys.stderr, flush=True)
    rows = []
    for what in dict.fromkeys(what for what, _ in found):
        aware, blind = found[what, "aware"], found[what, "blind"]
        each = ", ".join(f"{a / b:.2f}" for a, b in zip(aware, blind, strict=True))
        cells = f"{statistics.fmean(aware):,.4g}", f"{statistics.fmean(blind):,.4g}"
        rows.append([what, *cells, f"{sum(aware) / sum(blind):.2f}", each])
    table = markdown(["measure", "aware", "blind", "aware / blind", "in each round"], rows)
    print(table)
    if arguments.write:
        record("prefixes", table, "2-core VM, two workers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
