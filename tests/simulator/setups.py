"""Small machines and workloads that the simulator's tests share."""

import random

from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, make_scheduler
from melld.simulator.latency import ConstantLatency
from melld.simulator.links import LinkSettings
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import LogNormal, Workload, poisson

BYTES_PER_TOKEN = 1000
BLOCK_BYTES = 16 * BYTES_PER_TOKEN
BLOCKS = 100

SMALL = SimulatorSettings(
    capacity_bytes=BLOCKS * BLOCK_BYTES,
    bytes_per_token=BYTES_PER_TOKEN,
    latency=ConstantLatency(decode_step_s=0.02, prefill_token_s=0.0001),
    epoch_s=0.5,
)
PAPER_SLOTS = SimulatorSettings(
    capacity_bytes=SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=SMALL.latency,
    epoch_s=1.0,
    paper_slots=True,
)
SLOW_AND_FAULTY = SimulatorSettings(
    capacity_bytes=SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=SMALL.latency,
    epoch_s=0.5,
    wake_s=3.0,
    link=LinkSettings(bytes_per_s=500_000.0),
    failure_rate=0.2,
    seed=7,
)
FEW_GPUS = SimulatorSettings(
    capacity_bytes=SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=SMALL.latency,
    gpus=4,
    slots=5,
    epoch_s=0.5,
    link=LinkSettings(bytes_per_s=5e6),
)
PROMISED = SimulatorSettings(
    capacity_bytes=SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=SMALL.latency,
    epoch_s=0.5,
    wake_s=3.0,
    link=LinkSettings(bytes_per_s=5e6),
    targets=Targets(itl_s=0.03),
)
TWO_MACHINES = SimulatorSettings(
    capacity_bytes=SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=SMALL.latency,
    gpus=8,
    gpus_per_machine=4,
    epoch_s=0.5,
    wake_s=3.0,
    link=LinkSettings(bytes_per_s=5e6, kv_between_machines=False),
    machine_lost_at_s=25.0,
)
MACHINES = {
    "instant moves": SMALL,
    "paper slots": PAPER_SLOTS,
    "slow, faulty moves": SLOW_AND_FAULTY,
    "four GPUs, five slots": FEW_GPUS,
    "service targets": PROMISED,
    "two machines, one lost": TWO_MACHINES,
}


def small_load(seed: int = 1, rate_per_s: float = 2.0, seconds: float = 45.0) -> Workload:
    """Return about 90 requests of a tenth of a GPU on average, some of half of one."""
    return poisson(rate_per_s, seconds, LogNormal(60.0, 0.8, 200.0, 0.8), random.Random(seed))


def one_by_one(*requests: tuple[float, int, int]) -> Workload:
    """Return a workload of exactly these (arrival_s, prompt_tokens, output_tokens)."""
    arrival_s, prompt, output = (list(column) for column in zip(*requests, strict=True))
    return Workload(arrival_s, prompt, output)


def scheduler(policy: str, settings: SimulatorSettings) -> Scheduler:
    """Return the policy's scheduler for these machines."""
    return make_scheduler(policy, settings, SchedulerChoices())
