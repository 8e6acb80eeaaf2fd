"""How fast the simulator is: requests per second of wall time on one core.

    python benchmarks/simulator_speed.py                  best-fit at 10, 100 and 1,000 GPUs
    python benchmarks/simulator_speed.py --day            a day of a million requests with mell-plus

The load keeps the GPUs about 60 % full with about ten requests each, answers of 100 tokens in the median (two
seconds), epochs of one second.  A fixed loop of plain Python is timed before and after each run: where the two
differ, or differ from another machine's, so will the rest.
"""

import argparse
import random
import time

from cells import machine_settings

from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.latency import ConstantLatency
from melld.simulator.measures import Report
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import LogNormal, Workload, poisson

STEP_S = 0.02
ANSWER_TOKENS = 100
CHAT = LogNormal(prompt_median=300.0, prompt_sigma=0.8, output_median=ANSWER_TOKENS, output_sigma=0.5)
LONG_PROMPTS = LogNormal(prompt_median=800.0, prompt_sigma=0.8, output_median=130.0, output_sigma=0.8)
DAY_S = 86_400.0


def main() -> None:
    """Print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--day", action="store_true")
    arguments = parser.parse_args()
    if arguments.day:
        requests = arguments.requests or 1_000_000
        load = poisson(requests / DAY_S, DAY_S, LONG_PROMPTS, random.Random(1))
        measure(arguments.policy or "mell-plus", day_machines(), load)
        return
    for gpus in (10, 100, 1000):
        rate_per_s = gpus * 10 / (ANSWER_TOKENS * STEP_S) * 0.6
        seconds = (arguments.requests or 200_000) / rate_per_s
        load = poisson(rate_per_s, seconds, CHAT, random.Random(1))
        for _ in range(arguments.repeat):
            measure(arguments.policy or "best-fit", machines(gpus), load)


def machines(gpus: int) -> SimulatorSettings:
    """GPUs that hold ten or so of the requests."""
    bytes_per_token = 4096
    return SimulatorSettings(
        capacity_bytes=12 * 16 * 40 * bytes_per_token,
        bytes_per_token=bytes_per_token,
        latency=ConstantLatency(STEP_S, 1e-5),
        epoch_s=1.0,
        gpus=gpus,
    )


def day_machines() -> SimulatorSettings:
    """Return A100-40GB with LLaMA-2-13B, as many as are wanted, in the paper's time slots."""
    return machine_settings(
        "llama-2-13b",
        "a100-40g",
        epoch_s=1.0,
        paper_slots=True,
    )


def measure(policy: str, settings: SimulatorSettings, load: Workload) -> Report:
    """Simulate and print how long it took, in wall time and in processor time."""
    before_s = fixed_loop_s()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    report = run_policy(policy, settings, load, SchedulerChoices()).report
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    after_s = fixed_loop_s()
    print(
        f"{policy}: {len(load)} requests on {settings.gpus or 'any number of'} GPUs "
        f"({report.mean_gpus:.1f} awake, {report.preemptions} preemptions, {report.migrations} migrations): "
        f"{wall_s:.2f} s wall, {len(load) / wall_s:,.0f} requests/s; {cpu_s:.2f} s processor, "
        f"{len(load) / cpu_s:,.0f} requests/s; fixed loop {before_s * 1e3:.0f} and {after_s * 1e3:.0f} ms",
        flush=True,
    )
    return report


def fixed_loop_s() -> float:
    """Processor seconds of three million additions."""
    began_s = time.process_time()
    total = 0
    for number in range(3_000_000):
        total += number
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
