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
    replayed = "a decision log: replay its facts through the scheduler and check that it decides the same"
    add_flag(source, "--replay FILE", replayed, type=Path)
    lengths = "CSV (or gzip) of prompt_tokens, output_tokens to draw from; or "
    lengths += "lognormal[:PROMPT_MEDIAN,SIGMA,OUTPUT_MEDIAN,SIGMA]; replaces a trace's own"
    add_flag(group, "--lengths FILE", lengths)
    add_flag(group, "--length-factor X", "all lengths times X (the paper: 10)", type=_positive, default=1.0)
    add_flag(group, "--rate RATE", "stretch a trace's arrivals to RATE per second", type=_positive)
    seconds = "stop the arrivals after N seconds (needed with --poisson)"
    add_flag(group, "--seconds N", seconds, type=_positive, default=math.inf)
    bursts = "with --poisson: standard deviation of the times between arrivals by their mean; above 1: bursts"
    add_flag(group, "--variation CV", bursts, type=_bursts, default=1.0)
    high = "share of the requests that have high priority, from 0 to 1"
    add_flag(group, "--high-part P", high, type=_probability)
    add_flag(group, "--seed S", "seed of all random choices (default: 0)", type=int, default=0)


def add_machines(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the GPUs, the model and the links."""
    add_flag(group, "--model M", f"{', '.join(MODELS)}, or a config.json (default: llama-2-13b)")
    add_flag(group, "--gpu G", f"{', '.join(CARDS)}, or its memory, such as 24GiB (default: a100-40g)")
    add_flag(group, "--capacity-bytes N", "KV bytes of a GPU, instead of --model and --gpu", type=_bytes)
    add_flag(group, "--bytes-per-token N", "KV bytes of one token (needed with --capacity-bytes)", type=_bytes)
    add_flag(group, "--step-ms MS", "duration of every decode step (default: from measured tables)", type=_positive)
    add_flag(group, "--gpus N", "at most N GPUs (default: no limit)", type=_count)
    add_flag(group, "--slots N", "requests that a GPU runs at once (default: 256)", type=_slots, default=256)
    wake = "delay until an activated GPU computes (default: 0)"
    add_flag(group, "--wake-s S", wake, type=_not_negative, default=0.0)
    pace = "longest mean time between tokens for each request (default: no limit)"
    add_flag(group, "--itl-target-ms T", pace, type=_positive)
    first = "time until the first token, or four times as long as the prompt takes alone (default with "
    first += "--itl-target-ms: 2)"
    add_flag(group, "--ttft-target-s S", first, type=_positive)
    _add_links(group)


def _add_links(group: argparse._ArgumentGroup) -> None:
    rate = "bytes a second between GPUs, such as 4GiB; migrations then take time, and memory on both sides "
    rate += "(default: instant)"
    add_flag(group, "--link-rate BYTES", rate, type=_bytes)
    machines = "with --gpus and --link-rate: the GPUs are on N machines, and between those requests move as tokens "
    machines += "(default: KV goes between all GPUs)"
    add_flag(group, "--machines N", machines, type=_count)
    between = "with --machines: KV goes between machines too, so many bytes a second out of each and into each"
    add_flag(group, "--machine-link-rate BYTES", between, type=_bytes)
    lost = "with --machines: the first is lost after S seconds"
    add_flag(group, "--lose-machine-s S", lost, type=_not_negative)
    add_flag(group, "--failure-rate P", "share of the migrations that fail (default: 0)", type=_part, default=0.0)


def add_scheduler(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the policy and how often it plans."""
    policies = f"{', '.join(ALL_POLICIES)} (default: {SchedulerConfig().policy}; with --replay: the log's)"
    add_flag(group, "--policy P[,P...]", policies)
    add_flag(group, "--epoch-ms MS", "period of re-planning (default: 100)", type=_positive, default=100.0)
    slots = "judge overflow after the scheduler has acted on the epoch, as the paper's time slots do"
    add_flag(group, "--paper-slots", slots, action="store_true")
    awake = "how long an empty GPU stays awake (default: 0; mell-slo with targets: as long as waking costs more)"
    add_flag(group, "--retire-after-s S", awake, type=_not_negative)


def add_output(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the output."""
    add_flag(group, "--json", "print one JSON object", action="store_true")
    log = "write every fact and decision, one JSON object per line (one policy only)"
    add_flag(group, "--decision-log FILE", log, type=Path)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "a size")
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"not a number of bytes: {text!r} (write 4GiB, 512MiB or 1000000, for example)"
        ) from None
