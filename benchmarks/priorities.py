"""What priorities give the urgent and cost the others, simulated: `PYTHONPATH=.:benchmarks python FILE [--write]`.

Bursts (Gamma arrivals of a growing coefficient of variation) on four GPUs that all compute, a tenth of the requests of
high priority.  Each load is run twice: with the scheduler knowing of the priorities, and not.  Ratios, on by off, of
the same requests: the mean over the seeds, and the least and the most.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable

import msgspec

from benchmarks.slo_cells import GIB, machine_settings
from benchmarks.tables import RESULTS, record
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from melld.simulator.measures import ClassReport
from melld.simulator.workload import LogNormal, gamma

HIGH_PART = 0.1
LENGTHS = LogNormal(200.0, 1.0, 200.0, 0.9)
VARIATIONS = (2.0, 4.0, 6.0, 8.0)
MEASURES: dict[str, tuple[str, Callable[[ClassReport], float]]] = {
    "high: p99 of the first token": ("high", lambda found: found.ttft_s.p99),
    "high: mean time between tokens": ("high", lambda found: found.itl_s.mean),
    "normal: mean latency": ("normal", lambda found: found.latency_s.mean),
}


def measured(variation: float, seed: int, asked: argparse.Namespace, *, tells: bool) -> dict[str, ClassReport]:
    """Return one run's results by class."""
    chance = random.Random(f"{variation} {seed}")
    load = gamma(asked.rate, variation, asked.seconds, LENGTHS, chance).with_high(HIGH_PART, chance)
    settings = machine_settings(
        "llama-3.1-8b", "rtx-4090", gpus=4, epoch_s=0.1, link=LinkSettings(4 * GIB), seed=seed, targets=Targets(0.05)
    )
    settings = msgspec.structs.replace(settings, tells_priorities=tells)
    return run_policy("mell-slo", settings, load, SchedulerChoices(retire_after_s=60.0)).report.by_class


def main() -> int:
    """Measure every load on and off in turns; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/priorities.json")
    asked = parser.parse_args()
    rows = []
    for variation in VARIATIONS:
        ratios: dict[str, list[float]] = {name: [] for name in MEASURES}
        on_off: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in MEASURES}
        for seed in range(asked.seeds):
            on, off = (measured(variation, seed, asked, tells=tells) for tells in (True, False))
            for name, (which, figure) in MEASURES.items():
                on_off[name][0].append(figure(on[which]))
                on_off[name][1].append(figure(off[which]))
                ratios[name].append(figure(on[which]) / figure(off[which]))
        for name, found in ratios.items():
            means = (f"{statistics.fmean(values):.3f}" for values in on_off[name])
            spread = f"{statistics.fmean(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"
            rows.append([f"{variation:g}", name, *means, *spread])
            print(" | ".join(rows[-1]), flush=True)
    if asked.write:
        columns = ["variation", "seconds", "on", "off", "on / off", "least to most"]
        lines = (f"| {' | '.join(row)} |" for row in (columns, ["-"] * len(columns), *rows))
        record(RESULTS, "priorities", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
