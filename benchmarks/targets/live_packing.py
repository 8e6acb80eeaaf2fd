"""The same load on fewer workers: every policy on a real daemon, and the simulator beside it.

    python -m benchmarks.targets.live_packing ../shared/traces/azure2023_conv.csv.gz --output benchmarks/out/live

Requests of a trace are played open loop against `melld serve` with four CPU workers, once for each policy; lengths are
scaled so that the workers' small KV is what binds, and --shape gives their arrivals nights and noons, or bursts.  The
simulator runs the same arrivals with what the daemon learned of its steps, prompts and moves (`live_figures`).  With
--step-ms (--decode-ms, --prompt-token-ms) every step of a worker lasts at least so long, asleep for the rest: as on
devices of their own, which do not wait for one another's cores.  `mell-slo` is given the two targets, and reckons
itself how long idle workers stay; others keep them for --sleep-after-s.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import OUT, paced_environment, parser_of, record
from benchmarks.targets.live_figures import Figures, client_figures, good_of, learned_from, log_figures, move_of
from benchmarks.targets.live_load import play
from melld.config import MigrationConfig, SchedulerConfig
from melld.demo_model import make_demo_model
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.latency import Latency
from melld.simulator.links import LinkSettings
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload, read_trace
from tests.serve.daemon_process import DaemonProcess

POLICIES = ("best-fit", "worst-fit", "load-balance", "mell-plus", "mell-slo")
BLOCK_TOKENS, BYTES_PER_TOKEN = 32, 4096
SHAPES = ("trace", "diurnal", "bursty")
MOVES = (0.8, 0.9, 1.0, 1.1, 1.2)
"""Factors of what a move takes, simulated each: a run of few workers turns on which request moves first."""
MOST_MOVES = MigrationConfig().max_moves_per_link
NIGHT, DAYS = 0.1, 2
"""The least of a day's rate, as a part of its mean, and how many days the load has."""
BURST, BURST_PART, BURSTS = 4.0, 0.15, 3
"""The rate of a burst, in mean rates, the part of the time that has it, and how many there are."""


def piece(arguments: argparse.Namespace) -> Workload:
    """Return requests of the trace, as many as the rate wants, their lengths scaled, none above a worker."""
    whole = read_trace(arguments.trace)
    those = slice(arguments.first, arguments.first + round(arguments.rate * arguments.seconds))
    began_s = whole.arrival_s[those.start]
    arrival_s = [at_s - began_s for at_s in whole.arrival_s[those]]
    trace = Workload(arrival_s, whole.prompt_tokens[those], whole.output_tokens[those]).stretched(arguments.rate)
    arrival_s = trace.arrival_s if arguments.shape == "trace" else shaped(len(trace), arguments)
    most = arguments.worker_tokens - BLOCK_TOKENS
    prompts = [min(most // 2, max(1, round(n * arguments.prompt_factor))) for n in trace.prompt_tokens]
    answers = [max(2, round(n * arguments.output_factor)) for n in trace.output_tokens]
    return Workload(arrival_s, prompts, answers).limited(most)


def shaped(count: int, arguments: argparse.Namespace) -> list[float]:
    """Return that many arrivals at random in the given time, more where the shape has more."""
    chance = random.Random(arguments.first)

    def weight(part: float) -> float:
        if arguments.shape == "diurnal":
            return 1.0 - (1.0 - NIGHT) * math.cos(2 * math.pi * DAYS * part)
        calm = (1.0 - BURST * BURST_PART) / (1.0 - BURST_PART)
        return BURST if (part * BURSTS) % 1.0 > 1.0 - BURST_PART else calm

    parts: list[float] = []
    while len(parts) < count:
        part = chance.random()
        if chance.random() * BURST < weight(part):
            parts.append(part)
    return [part * arguments.seconds for part in sorted(parts)]


def live(policy: str, workload: Workload, model: Path, arguments: argparse.Namespace) -> Figures:
    """Run one policy on a daemon of its own."""
    decisions = arguments.output / f"{policy}.jsonl"
    decisions.unlink(missing_ok=True)
    kv_bytes = (arguments.worker_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS * BYTES_PER_TOKEN  # one is vLLM's own
    flags = ["--device", f"cpu:{arguments.workers}", "--kv-bytes", str(kv_bytes)]
    settings: Figures = {"scheduler.policy": policy, "scheduler.decision_log": str(decisions)}
    settings |= {"idle.stop_after_s": 3600.0}
    if policy == MellSlo.name:
        settings |= {"targets.itl_ms": arguments.itl_ms, "targets.ttft_s": arguments.ttft_s}
    else:
        settings |= {"idle.sleep_after_s": arguments.sleep_after_s}
    for key, value in settings.items():
        flags += ["--set", f"{key}={json.dumps(value)}"]
    costs_s = [ms / 1e3 for ms in (arguments.step_ms, arguments.decode_ms, arguments.prompt_token_ms)]
    environment = paced_environment(arguments.output / "paced", *costs_s)
    with DaemonProcess(model, *flags, environment=environment, genuine=True) as daemon:
        daemon.wait_ready()
        asyncio.run(play(daemon.url, Workload([0.0] * 8, [64] * 8, [32] * 8), 1))  # every worker's first steps
        wait_asleep(daemon)
        began_s = time.monotonic()
        played = asyncio.run(play(daemon.url, workload, 0))
        ended_s = time.monotonic()
        wait_asleep(daemon)
        status = daemon.status()
    assert all(worker["used_blocks"] == 0 for worker in status["workers"]), "blocks are not free at the end"
    learned = learned_from(decisions, BYTES_PER_TOKEN)
    figures = client_figures(played) | log_figures(decisions, began_s, ended_s)
    good = good_of(played, learned, targets_of(arguments))
    figures |= {"good": good / len(played), "goodput": good / figures["worker_s"]}
    return figures | simulated(policy, workload, learned, *move_of(decisions, MOST_MOVES), arguments)


def targets_of(arguments: argparse.Namespace) -> Targets:
    """Return what requests are promised; nobody is sent away."""
    return Targets(itl_s=arguments.itl_ms / 1e3, ttft_s=arguments.ttft_s, sheds=False)


def wait_asleep(daemon: DaemonProcess) -> None:
    """Until no worker is awake: the log is whole then."""
    while any(worker["state"] == "ready" for worker in daemon.status()["workers"]):
        time.sleep(0.2)


def simulated(
    policy: str, workload: Workload, latency: Latency, move_s: float, gap_s: float, arguments: argparse.Namespace
) -> Figures:
    """Return the simulator's figures for the same arrivals at the live run's speed, as the daemon is set: means.

    `move_s`: what a move takes however small it is, once it is its turn: its messages wait for both workers' steps.
    `gap_s`: how much longer than for a step its client waits for the next token: until a step begins there.
    """
    runs = [simulated_once(policy, workload, latency, move_s * factor, gap_s, arguments) for factor in MOVES]
    return {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}


def simulated_once(
    policy: str, workload: Workload, latency: Latency, move_s: float, gap_s: float, arguments: argparse.Namespace
) -> Figures:
    """Return the figures of one run in which a move takes so long, and its client waits so long after it."""
    rate_bytes_s = arguments.link_bytes_per_s
    settings = SimulatorSettings(
        capacity_bytes=arguments.worker_tokens // BLOCK_TOKENS * BLOCK_TOKENS * BYTES_PER_TOKEN,
        bytes_per_token=BYTES_PER_TOKEN,
        latency=latency,
        gpus=arguments.workers,
        slots=64,
        block_tokens=BLOCK_TOKENS,
        link=LinkSettings(rate_bytes_s, delay_s=move_s, most_moves=MOST_MOVES, kv_gap_s=gap_s),
        targets=targets_of(arguments),
    )
    retire_after_s = None if policy == MellSlo.name else arguments.sleep_after_s
    choices = SchedulerChoices(retire_after_s=retire_after_s, horizon_s=SchedulerConfig().headroom_s)
    report = run_policy(policy, settings, workload, choices).report
    goodput = report.goodput_per_gpu_second or 0.0
    return {
        "simulated_worker_s": report.gpu_seconds,
        "simulated_good": goodput * report.gpu_seconds / len(workload),
        "simulated_goodput": goodput,
    }


def main() -> None:
    """Run all policies, one after the other, and print a line for each."""
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    workload = piece(arguments)
    print(f"{len(workload)} requests, {sum(workload.output_tokens)} tokens to be made", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "demo"
        make_demo_model(model)
        for round_number in range(arguments.rounds):
            for policy in arguments.policies.split(","):
                row = {"policy": policy, "round": round_number} | live(policy, workload, model, arguments)
                rows.append(row)
                print(json.dumps(row), flush=True)
    (arguments.output / "figures.json").write_text(json.dumps(rows, indent=1))
    print(table(rows, arguments.shape))
    if arguments.write:
        name = "live-packing" if arguments.shape == "trace" else "live-slo"
        record(name, table(rows, arguments.shape), f"2-core VM, {arguments.workers} workers", beside=True)


def table(rows: list[Figures], shape: str) -> str:
    """Medians over the rounds."""
    lines = [
        "| load, policy | worker-seconds (simulator) | good, % | good per worker-second "
        "| migrations per request: KV, tokens (aborted) | preemptions | queued "
        "| TTFT p50 / p99 ms | ITL p50 / p99 ms | lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]

        def middle(key: str, part: int | None = None, mine: list[Figures] = mine) -> float:
            return statistics.median(row[key] if part is None else row[key][part] for row in mine)

        cells = (
            f"{middle('worker_s'):.0f} ({middle('simulated_worker_s'):.0f})",
            f"{100 * middle('good'):.1f} ({100 * middle('simulated_good'):.1f})",
            f"{middle('goodput'):.2f} ({middle('simulated_goodput'):.2f})",
            f"{middle('moves_kv'):.2f}, {middle('moves_tokens'):.2f} ({middle('aborted'):.2f})",
            f"{middle('preemptions'):.0f}",
            f"{middle('queued'):.0f}",
            f"{middle('ttft_ms', 0):.0f} / {middle('ttft_ms', 1):.0f}",
            f"{middle('itl_ms', 0):.1f} / {middle('itl_ms', 1):.1f}",
            str(sum(row["lost"] for row in mine)),
        )
        lines.append(f"| {shape}, {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path, help="CSV (or gzip) of arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--output", type=Path, default=OUT / "live", help="a folder for decision logs and figures")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=3.0, help="arrivals per second")
    parser.add_argument("--shape", choices=SHAPES, default="trace", help="when requests arrive")
    parser.add_argument("--first", type=int, default=0, help="the number of the trace's arrival to begin with")
    parser.add_argument("--prompt-factor", type=float, default=0.1)
    parser.add_argument("--output-factor", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--worker-tokens", type=int, default=640, help="KV of each worker")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a step takes at least so long")
    parser.add_argument("--decode-ms", type=float, default=0.0, help="and so much longer for each request that decodes")
    parser.add_argument("--prompt-token-ms", type=float, default=0.0, help="and for each token of a prompt")
    parser.add_argument("--sleep-after-s", type=float, default=1.0)
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--itl-ms", type=float, default=100.0)
    parser.add_argument("--link-bytes-per-s", type=float, default=1e9, help="the simulator's links")
    return parser.parse_args()


if __name__ == "__main__":
    main()
