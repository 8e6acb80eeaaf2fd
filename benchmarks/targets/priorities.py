"""What priorities give the urgent and cost the others, simulated.

Bursts (Gamma arrivals of a growing coefficient of variation) on four GPUs that all compute, a tenth of the requests of
high priority.  Each load is run twice: with the scheduler knowing of the priorities, and not.  Ratios, on by off, of
the same requests: the mean over the seeds, and the least and the most.  What the prompts of the urgent take alone
stands beside: no first token can come sooner, whatever is decided.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks.harness import markdown, parser_of, record
from benchmarks.targets.slo_cells import GIB, machine_settings
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from melld.simulator.measures import ClassReport
from melld.simulator.workload import LogNormal, gamma

HIGH_PART = 0.1
LENGTHS = LogNormal(200.0, 1.0, 200.0, 0.9)
VARIATIONS = (2.0, 4.0, 6.0, 8.0)
FIRST = "high: p99 of the first token"
ALONE = "high: p99 of what their prompts take alone"
MEASURES: dict[str, tuple[str, Callable[[ClassReport], float]]] = {
    FIRST: ("high", lambda found: found.ttft_s.p99),
    "high: mean time between tokens": ("high", lambda found: found.itl_s.mean),
    "normal: mean latency": ("normal", lambda found: found.latency_s.mean),
}


def measured(variation: float, seed: int, asked: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return each measure with the scheduler knowing of the priorities, and not."""
    chance = random.Random(f"{variation} {seed}")
    load = gamma(asked.rate, variation, asked.seconds, LENGTHS, chance).with_high(HIGH_PART, chance)
    settings = machine_settings(
        "llama-3.1-8b", "rtx-4090", gpus=4, epoch_s=0.1, link=LinkSettings(4 * GIB), seed=seed, targets=Targets(0.05)
    )
    on, off = (
        run_policy(
            "mell-slo", msgspec.structs.replace(settings, tells_priorities=tells), load, SchedulerChoices(None, 60.0)
        ).report.by_class
        for tells in (True, False)
    )
    found = {name: (figure(on[which]), figure(off[which])) for name, (which, figure) in MEASURES.items()}
    prompts = zip(load.prompt_tokens, load.priority, strict=True)
    alone_s = [settings.latency.prefill_s(tokens) for tokens, priority in prompts if priority < 0]
    return found | {ALONE: (float(np.percentile(alone_s, 99)), found[FIRST][1])}


def main() -> int:
    """Measure every load on and off in turns; print the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    asked = parser.parse_args()
    rows = []
    for variation in VARIATIONS:
        runs = [measured(variation, seed, asked) for seed in range(asked.seeds)]
        for name in runs[0]:
            pairs = [run[name] for run in runs]
            ratios = [on / off for on, off in pairs]
            means = (f"{statistics.fmean(values):.3f}" for values in zip(*pairs, strict=True))
            spread = f"{statistics.fmean(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append([f"{variation:g}", name, *means, *spread])
            print(" | ".join(rows[-1]), flush=True)
    if asked.write:
        columns = ["variation", "seconds", "on", "off", "on / off", "least to most"]
        record("priorities", markdown(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
