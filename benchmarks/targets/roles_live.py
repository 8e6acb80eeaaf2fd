"""What `roles = "auto"` gives on real workers.

Two daemons with four vLLM workers each, one with roles, one without, asked the same load in turns.  Steps last 30 ms,
1 ms for each request that decodes and 0.25 ms for each prompt token, asleep for what the processor needs less.  The
target is 1.5 lone steps, where the arithmetic says that a split pays.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import SMALL, markdown, paced_environment, parser_of, record
from benchmarks.targets.live_figures import log_figures
from benchmarks.targets.live_load import Played, play
from melld.scheduler.targets import MEAN_OVER_TOKENS
from melld.simulator.workload import LogNormal, Workload, gamma
from tests.migrate.live import Operator
from tests.serve.daemon_process import DaemonProcess

STEP_S, DECODE_S, PROMPT_TOKEN_S = 0.03, 0.001, 0.00025
LENGTHS = LogNormal(900.0, 0.5, 90.0, 0.4)
WARM_UP_S = 40.0
Figures = dict[str, float]


class Served:
    """A daemon with or without roles, and its decision log."""

    def __init__(self, roles: str, model: Path, scratch: Path, itl_s: float) -> None:
        self.roles = roles
        self._decisions = scratch / f"{roles}.jsonl"
        settings = {
            "scheduler.policy": '"mell-slo"',
            "scheduler.roles": f'"{roles}"',
            "scheduler.decision_log": f'"{self._decisions}"',
            "targets.itl_ms": str(itl_s * 1e3),
            "idle.sleep_after_s": "10",
        }
        flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        environment = paced_environment(scratch / "paced", STEP_S, DECODE_S, PROMPT_TOKEN_S)
        self.daemon = DaemonProcess(model, *SMALL.serve_flags(4), *flags, environment=environment, genuine=True)

    def play(self, load: Workload, seed: int, itl_s: float) -> Figures:
        """Play the load; return what its clients and the log saw."""
        began_s = time.monotonic()
        played = asyncio.run(play(self.daemon.url, load, seed))
        ended_s = time.monotonic()
        assert all(one.whole for one in played), [one.error for one in played if not one.whole][:3]
        Operator(self.daemon).wait_idle()
        log: dict[str, Any] = log_figures(self._decisions, began_s, ended_s)
        return {
            "answers with the pace": statistics.fmean(pace_s(one) <= itl_s for one in played),
            "mean time between tokens, s": statistics.fmean(map(pace_s, played)),
            "99th percentile of it, s": sorted(map(pace_s, played))[int(0.99 * len(played))],
            "median of the first token, s": statistics.median(one.ttft_s for one in played),
            "99th percentile of it": sorted(one.ttft_s for one in played)[int(0.99 * len(played))],
            "worker-seconds": log["worker_s"],
            "moves by KV a request": log["moves_kv"],
        }

    def because(self) -> str:
        """Return what the daemon says of its roles."""
        status = self.daemon.status()
        return f"{status['roles']}: {[worker['role'] for worker in status['workers']]}"


def pace_s(one: Played) -> float:
    """Return the mean time between an answer's tokens, as the daemon judges it."""
    return (one.arrivals_s[-1] - one.arrivals_s[0]) / max(one.tokens - 1, MEAN_OVER_TOKENS)


def main() -> int:
    """Play in turns; print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="of one load")
    parser.add_argument("--rate", type=float, default=4.5, help="requests per second")
    parser.add_argument("--itl-ms", type=float, default=45.0)
    asked = parser.parse_args()
    itl_s = asked.itl_ms / 1e3
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        SMALL.make_model(scratch / "model")
        both = [Served(roles, scratch / "model", scratch, itl_s) for roles in ("auto", "off")]
        for served in both:
            stack.enter_context(served.daemon)
            served.daemon.wait_ready()
            served.play(load_of(asked.rate, WARM_UP_S, "warm-up"), -1, itl_s)  # learns steps, prompts and moves
        for number in range(asked.rounds):
            load = load_of(asked.rate, asked.seconds, str(number))
            turn = both if number % 2 else reversed(both)
            rounds.append({served.roles: served.play(load, number, itl_s) for served in turn})
            print(number, rounds[-1], both[0].because(), flush=True)
    columns = ["measure", "auto", "off", "auto / off", "least to most of a round"]
    table = markdown(columns, (row(rounds, name) for name in rounds[0]["off"]))
    print(table)
    if asked.write:
        record("roles-live", table, "two CPU cores, paced")
    return 0


def load_of(rate: float, seconds: float, seed: str) -> Workload:
    """Return a load of that length."""
    return gamma(rate, 1.0, seconds, LENGTHS, random.Random(seed))


def row(rounds: list[dict[str, Figures]], name: str) -> list[str]:
    """Return the row of one measure: means over the rounds, and the ratio of each."""
    auto, off = (statistics.fmean(one[roles][name] for one in rounds) for roles in ("auto", "off"))
    each = [one["auto"][name] / one["off"][name] for one in rounds if one["off"][name]]
    ratio = f"{auto / off:.2f}" if off else "-"
    return [name, f"{auto:.3f}", f"{off:.3f}", ratio, f"{min(each):.2f} to {max(each):.2f}" if each else "-"]


if __name__ == "__main__":
    sys.exit(main())
