"""The flags of `melld simulate`, in groups, and the parsing of their values.

Owns what each flag accepts on its own; `melld.cli.simulation.command` owns how they combine.
"""

import argparse
import math
from pathlib import Path

from melld.cli.config_flags import add_flag, number_that
from melld.config import SchedulerConfig
from melld.config_values import parse_bytes
from melld.errors import ConfigError
from melld.simulator.catalogue import CARDS, MODELS
from melld.simulator.experiment import ALL_POLICIES

MOST_SLOTS = 1 << 16
"""The simulator reckons with a step for each number of requests."""

_positive = number_that("must be above zero", lambda value: 0 < value < math.inf)
_not_negative = number_that("must not be below zero", lambda value: 0 <= value < math.inf)
_probability = number_that("must be above 0 and at most 1", lambda value: 0 < value <= 1)
_part = number_that("must be at least 0 and below 1", lambda value: 0 <= value < 1)
_count = number_that("must be above zero", lambda value: value > 0, int)
_bursts = number_that("must be from 0.01 to 100", lambda value: 0.01 <= value <= 100)
_slots = number_that(f"must be from 1 to {MOST_SLOTS}", lambda value: 1 <= value <= MOST_SLOTS, int)


def add_load(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the requests: which arrive, and when."""
    source = group.add_mutually_exclusive_group(required=True)
    add_flag(source, "--trace FILE", "CSV (or gzip): arrival_s, prompt_tokens, output_tokens", type=Path)
    add_flag(source, "--poisson RATE", "arrivals per second of a Poisson process", type=_positive)
    replayed = "decision log whose facts to replay through the scheduler, checking that it decides the same"
    add_flag(source, "--replay FILE", replayed, type=Path)
    lengths = "CSV (or gzip) of prompt_tokens, output_tokens to sample from; or "
    lengths += "lognormal[:PROMPT_MEDIAN,SIGMA,OUTPUT_MEDIAN,SIGMA]; replaces a trace's own"
    add_flag(group, "--lengths FILE", lengths)
    add_flag(group, "--length-factor X", "multiply all lengths by X (the paper: 10)", type=_positive, default=1.0)
    add_flag(group, "--rate RATE", "rescale a trace's arrivals to RATE per second", type=_positive)
    seconds = "stop arrivals after N seconds (required with --poisson)"
    add_flag(group, "--seconds N", seconds, type=_positive, default=math.inf)
    bursts = "with --poisson: coefficient of variation of the times between arrivals; above 1: bursts"
    add_flag(group, "--variation CV", bursts, type=_bursts, default=1.0)
    high = "fraction of requests with high priority, from 0 to 1"
    add_flag(group, "--high-part P", high, type=_probability)
    add_flag(group, "--seed S", "random seed (default: 0)", type=int, default=0)


def add_machines(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the GPUs, the model and the links."""
    add_flag(group, "--model M", f"{', '.join(MODELS)}, or a config.json (default: llama-2-13b)")
    add_flag(group, "--gpu G", f"{', '.join(CARDS)}, or its memory, such as 24GiB (default: a100-40g)")
    add_flag(group, "--capacity-bytes N", "KV bytes per GPU, instead of --model and --gpu", type=_bytes)
    add_flag(group, "--bytes-per-token N", "KV bytes per token (required with --capacity-bytes)", type=_bytes)
    add_flag(group, "--step-ms MS", "duration of every decode step (default: from measured tables)", type=_positive)
    add_flag(group, "--gpus N", "at most N GPUs (default: no limit)", type=_count)
    add_flag(group, "--slots N", "concurrent requests per GPU (default: 256)", type=_slots, default=256)
    wake = "delay before an activated GPU can compute (default: 0)"
    add_flag(group, "--wake-s S", wake, type=_not_negative, default=0.0)
    pace = "maximum mean time between tokens per request (default: no limit)"
    add_flag(group, "--itl-target-ms T", pace, type=_positive)
    first = "maximum time to first token, or four times what the prompt takes alone (default with "
    first += "--itl-target-ms: 2)"
    add_flag(group, "--ttft-target-s S", first, type=_positive)
    _add_links(group)


def _add_links(group: argparse._ArgumentGroup) -> None:
    rate = "bytes per second between GPUs, such as 4GiB; migrations then take time, and memory on both sides "
    rate += "(default: instant)"
    add_flag(group, "--link-rate BYTES", rate, type=_bytes)
    machines = "with --gpus and --link-rate: spread the GPUs over N machines, between which requests move by tokens "
    machines += "(default: KV moves between all GPUs)"
    add_flag(group, "--machines N", machines, type=_count)
    between = "with --machines: KV also moves between machines, at this many bytes per second in and out of each"
    add_flag(group, "--machine-link-rate BYTES", between, type=_bytes)
    lost = "with --machines: lose the first one after S seconds"
    add_flag(group, "--lose-machine-s S", lost, type=_not_negative)
    add_flag(group, "--failure-rate P", "fraction of migrations that fail (default: 0)", type=_part, default=0.0)


def add_scheduler(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the policy and how often it plans."""
    policies = f"{', '.join(ALL_POLICIES)} (default: {SchedulerConfig().policy}; with --replay: the log's)"
    add_flag(group, "--policy P[,P...]", policies)
    add_flag(
        group, "--epoch-ms MS", "interval between re-planning passes (default: 100)", type=_positive, default=100.0
    )
    slots = "check for overflow only after the scheduler has acted on the epoch, like the paper's time slots"
    add_flag(group, "--paper-slots", slots, action="store_true")
    awake = "how long an empty GPU stays awake (default: 0; mell-slo with targets: while that beats waking)"
    add_flag(group, "--retire-after-s S", awake, type=_not_negative)


def add_output(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the output."""
    add_flag(group, "--json", "print one JSON object", action="store_true")
    log = "log every fact and decision, one JSON object per line (one policy only)"
    add_flag(group, "--decision-log FILE", log, type=Path)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "a size")
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"not a number of bytes: {text!r} (write 4GiB, 512MiB or 1000000, for example)"
        ) from None
