"""The same load on fewer workers: every policy on a real daemon, and the simulator beside it.

    PYTHONPATH=. python benchmarks/live_packing.py ../shared/traces/azure2023_conv.csv.gz --output benchmarks/out/live

A piece of a trace is played open loop against `melld serve` with four CPU workers, once for each policy; lengths are
scaled so that the workers' small KV is what binds.  Worker-seconds come from the decision log (kept in --output): the
time between `activate` and `retire`.  The simulator runs the same arrivals with that very run's median time between
tokens and with the prefill rate of requests that were alone on the daemon before.  A request is good when its first
token came within --ttft-s and its mean time between tokens is within --itl-ms.  With --step-ms
(--decode-ms, --prompt-token-ms) every step of a worker lasts at least so long, asleep for the rest: as on devices of
their own, which do not wait for one another's cores.  `mell-slo` is given the two targets.
"""

import argparse
import asyncio
import collections
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from live_load import Played, play, spread_ms

from benchmarks.paced import paced_environment
from melld.config import SchedulerConfig
from melld.demo_model import make_demo_model
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.latency import ConstantLatency
from melld.simulator.links import LinkSettings
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload, read_trace
from tests.serve.daemon_process import DaemonProcess

POLICIES = ("best-fit", "worst-fit", "load-balance", "mell-plus", "mell-slo")
BLOCK_TOKENS, BYTES_PER_TOKEN = 32, 4096
LONELY = 7
Figures = dict[str, Any]


def piece(arguments: argparse.Namespace) -> Workload:
    """Arrivals of the trace, as many as the rate wants, prompts and answers scaled apart, none above a worker."""
    whole = read_trace(arguments.trace)
    those = slice(arguments.first, arguments.first + round(arguments.rate * arguments.seconds))
    began_s = whole.arrival_s[those.start]
    arrival_s = [at_s - began_s for at_s in whole.arrival_s[those]]
    trace = Workload(arrival_s, whole.prompt_tokens[those], whole.output_tokens[those]).stretched(arguments.rate)
    most = arguments.worker_tokens - BLOCK_TOKENS
    prompts = [min(most // 2, max(1, round(n * arguments.prompt_factor))) for n in trace.prompt_tokens]
    answers = [max(2, round(n * arguments.output_factor)) for n in trace.output_tokens]
    return Workload(trace.arrival_s, prompts, answers).limited(most)


def live(policy: str, workload: Workload, model: Path, arguments: argparse.Namespace) -> Figures:
    """One policy on a daemon of its own."""
    decisions = arguments.output / f"{policy}.jsonl"
    decisions.unlink(missing_ok=True)
    kv_bytes = (arguments.worker_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS * BYTES_PER_TOKEN  # one is vLLM's own
    flags = ["--device", f"cpu:{arguments.workers}", "--kv-bytes", str(kv_bytes)]
    settings = {"scheduler.policy": policy, "scheduler.decision_log": str(decisions)}
    settings |= {"idle.sleep_after_s": arguments.sleep_after_s, "idle.stop_after_s": 3600.0}
    for key, value in settings.items():
        flags += ["--set", f"{key}={json.dumps(value)}"]
    if policy == "mell-slo":
        flags += ["--set", f"targets.itl_ms={arguments.itl_ms}", "--set", f"targets.ttft_s={arguments.ttft_s}"]
    costs_s = [ms / 1e3 for ms in (arguments.step_ms, arguments.decode_ms, arguments.prompt_token_ms)]
    environment = paced_environment(arguments.output / "paced", *costs_s)
    with DaemonProcess(model, *flags, environment=environment, genuine=True) as daemon:
        daemon.wait_ready()
        asyncio.run(play(daemon.url, Workload([0.0] * 8, [64] * 8, [32] * 8), 1))  # every worker's first steps
        prefill_token_s = asyncio.run(lonely_prefill_token_s(daemon.url, max(workload.prompt_tokens)))
        began_s = time.monotonic()
        played = asyncio.run(play(daemon.url, workload, 0))
        wait_asleep(daemon)
        status = daemon.status()
    assert all(worker["used_blocks"] == 0 for worker in status["workers"]), "blocks are not free at the end"
    return client_figures(played, arguments) | log_figures(decisions, began_s) | {"prefill_token_s": prefill_token_s}


async def lonely_prefill_token_s(url: str, tokens: int) -> float:
    """By how much a prompt of so many tokens delays the first token more than one of 16, for each token."""
    ttfts_s: dict[int, list[float]] = {16: [], tokens: []}
    for number in range(2 * LONELY):
        length = tokens if number % 2 else 16
        [one] = await play(url, Workload([0.0], [length], [2]), 2 + number)
        ttfts_s[length].append(one.ttft_s)
    return max(0.0, statistics.median(ttfts_s[tokens]) - statistics.median(ttfts_s[16])) / (tokens - 16)


def wait_asleep(daemon: DaemonProcess) -> None:
    """Until no worker is awake: the log is whole then."""
    while any(worker["state"] == "ready" for worker in daemon.status()["workers"]):
        time.sleep(0.2)


def client_figures(played: list[Played], arguments: argparse.Namespace) -> Figures:
    """Return what the clients saw."""
    whole = [one for one in played if one.whole]
    gaps = [gap_s for one in whole for gap_s in one.gaps_s]
    good = [
        one
        for one in whole
        if one.ttft_s <= arguments.ttft_s and statistics.mean(one.gaps_s or [0.0]) * 1e3 <= arguments.itl_ms
    ]
    return {
        "requests": len(played),
        "lost": len(played) - len(whole),
        "ttft_ms": spread_ms([one.ttft_s for one in whole]),
        "itl_ms": spread_ms(gaps),
        "good": len(good) / len(played),
    }


def log_figures(decisions: Path, since_s: float) -> Figures:
    """Return what the decision log says of the time after `since_s` (the same clock: one machine)."""
    awake: dict[str, float] = {}
    worker_s, peak = 0.0, 0
    counts: collections.Counter[str] = collections.Counter()
    ways: dict[str, str] = {}
    for line in decisions.read_text().splitlines():
        record = json.loads(line)
        at_s, kind = max(record["at"], since_s), record["kind"]
        if kind == "activate":
            awake[record["worker"]] = at_s
            peak = max(peak, len(awake)) if record["at"] > since_s else peak
        elif kind == "retire":
            worker_s += at_s - awake.pop(record["worker"], at_s)
        elif record["at"] < since_s:
            continue
        elif kind == "move":
            ways[record["request"]] = record["via"]
        elif kind == "moved":
            counts[ways[record["request"]] if record["outcome"] == "committed" else "aborted"] += 1
        else:
            counts[kind] += 1
    requests = max(1, counts["arrive"])
    return {
        "worker_s": worker_s,
        "peak": peak,
        "moves_kv": counts["kv"] / requests,
        "moves_tokens": counts["tokens"] / requests,
        "aborted": counts["aborted"] / requests,
        "preemptions": counts["preempt"],
        "queued": counts["queue"],
    }


def simulated(policy: str, workload: Workload, row: Figures, arguments: argparse.Namespace) -> float:
    """Return the simulator's worker-seconds for the same arrivals at the live run's pace, as the daemon is set."""
    settings = SimulatorSettings(
        capacity_bytes=arguments.worker_tokens // BLOCK_TOKENS * BLOCK_TOKENS * BYTES_PER_TOKEN,
        bytes_per_token=BYTES_PER_TOKEN,
        latency=ConstantLatency(row["itl_ms"][0] / 1e3, row["prefill_token_s"]),
        gpus=arguments.workers,
        slots=64,
        block_tokens=BLOCK_TOKENS,
        link=LinkSettings(bytes_per_s=arguments.link_bytes_per_s, delay_s=arguments.move_s),
    )
    choices = SchedulerChoices(retire_after_s=arguments.sleep_after_s, horizon_s=SchedulerConfig().headroom_s)
    return run_policy(policy, settings, workload, choices).report.gpu_seconds


def main() -> None:
    """All policies, one after the other, a line each."""
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
                row["simulated_worker_s"] = simulated(policy, workload, row, arguments)
                rows.append(row)
                print(json.dumps(row), flush=True)
    (arguments.output / "figures.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


def table(rows: list[Figures]) -> str:
    """Medians over the rounds."""
    lines = [
        "| policy | worker-seconds | simulator | migrations per request: KV, tokens (aborted) | preemptions | queued "
        "| TTFT p50 / p99 ms | ITL p50 / p99 ms | good | lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]

        def middle(key: str, part: int | None = None, mine: list[Figures] = mine) -> float:
            return statistics.median(row[key] if part is None else row[key][part] for row in mine)

        cells = (
            f"{middle('worker_s'):.0f}",
            f"{middle('simulated_worker_s'):.0f}",
            f"{middle('moves_kv'):.2f}, {middle('moves_tokens'):.2f} ({middle('aborted'):.2f})",
            f"{middle('preemptions'):.0f}",
            f"{middle('queued'):.0f}",
            f"{middle('ttft_ms', 0):.0f} / {middle('ttft_ms', 1):.0f}",
            f"{middle('itl_ms', 0):.1f} / {middle('itl_ms', 1):.1f}",
            f"{middle('good'):.3f}",
            str(sum(row["lost"] for row in mine)),
        )
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="CSV (or gzip) of arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--output", type=Path, required=True, help="a folder for decision logs and figures")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=3.0, help="arrivals per second")
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
    parser.add_argument("--move-s", type=float, default=0.05, help="the simulator's fixed cost of a move")
    return parser.parse_args()


if __name__ == "__main__":
    main()
