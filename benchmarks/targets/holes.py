"""What holes give a large request at the head of the line, simulated.

Chats and a few prompts of 56 % of a GPU on GPUs that all compute.  Each load is run with holes and without:
the 99th percentile of what the large ones wait for room, and what all wait on average.
"""

import random
import statistics
import sys

import numpy as np

from benchmarks.harness import markdown, parser_of, record
from benchmarks.targets.slo_cells import GIB, machine_settings
from melld.scheduler.priorities import Priorities
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, make_scheduler
from melld.simulator.links import LinkSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import LogNormal, Workload, poisson

LARGE_TOKENS, LARGE_PART, ANSWER_TOKENS = 26_000, 0.003, 200
CHATS = LogNormal(400.0, 1.0, 400.0, 0.9)


def load_of(rate: float, seconds: float, seed: int) -> Workload:
    """Return chats at random, three in a thousand with a large prompt."""
    chance = random.Random(f"holes {seed}")
    chats = poisson(rate, seconds, CHATS, chance)
    large = [chance.random() < LARGE_PART for _ in chats.arrival_s]
    prompts = [LARGE_TOKENS if one else tokens for one, tokens in zip(large, chats.prompt_tokens, strict=True)]
    outputs = [ANSWER_TOKENS if one else tokens for one, tokens in zip(large, chats.output_tokens, strict=True)]
    return Workload(chats.arrival_s, prompts, outputs)


def waits_s(load: Workload, gpus: int, seed: int, hole_s: float) -> tuple[float, float, int]:
    """Return the 99th percentile of the large ones' waits, the mean of all, and the moves."""
    targets = Targets(0.05, sheds=False)
    settings = machine_settings(
        "llama-3.1-8b", "rtx-4090", gpus=gpus, epoch_s=0.1, link=LinkSettings(4 * GIB), seed=seed, targets=targets
    )
    choices = SchedulerChoices(retire_after_s=60.0, priorities=Priorities(hole_s=hole_s))
    measures = Simulation(settings, load, make_scheduler("mell-slo", settings, choices)).run()
    waited_s = np.array(measures.placed_s) - np.array(load.arrival_s)
    large = np.array(load.prompt_tokens) == LARGE_TOKENS
    return float(np.percentile(waited_s[large], 99)), float(waited_s.mean()), measures.counts.migrations


def main() -> int:
    """Measure every load with and without holes in turns; print the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--rate", type=float, nargs="+", default=[13.0, 14.0, 15.0], help="requests per second")
    parser.add_argument("--gpus", type=int, default=8)
    asked = parser.parse_args()
    rows = []
    for rate in asked.rate:  # at least one large one waits at each
        found = {}
        for seed in range(asked.seeds):
            load = load_of(rate, asked.seconds, seed)
            for hole_s in (2.0, 0.0):
                found[seed, hole_s] = waits_s(load, asked.gpus, seed, hole_s)
        for number, what in enumerate(("large: p99 wait, s", "all: mean wait, s", "moves")):
            on, off = ([found[seed, hole_s][number] for seed in range(asked.seeds)] for hole_s in (2.0, 0.0))
            ratios = [one / other for one, other in zip(on, off, strict=True) if other]
            spread = [f"{statistics.fmean(on) / statistics.fmean(off):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
            rows.append([f"{rate:g}", what, f"{statistics.fmean(on):.3f}", f"{statistics.fmean(off):.3f}", *spread])
            print(" | ".join(rows[-1]), flush=True)
    if asked.write:
        columns = ["requests/s", "measure", "on", "off", "on / off", "least to most"]
        record("holes", markdown(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
