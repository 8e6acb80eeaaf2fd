"""The flags of `melld simulate`, in groups, and the parsing of their values.

Owns what each flag accepts on its own; `melld.cli.simulation.command` owns how they combine.
"""

import argparse
import math
import pathlib

from melld.cli.config_flags import number_that
from melld.config import SchedulerConfig
from melld.simulator.catalogue import CARDS, MODELS, parse_bytes
from melld.simulator.experiment import ALL_POLICIES

_positive = number_that("must be above zero", lambda value: 0 < value < math.inf)
_not_negative = number_that("must not be below zero", lambda value: 0 <= value < math.inf)
_probability = number_that("must be above 0 and at most 1", lambda value: 0 < value <= 1)
_part = number_that("must be at least 0 and below 1", lambda value: 0 <= value < 1)
_count = number_that("must be above zero", lambda value: value > 0, int)


def add_load(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the requests: which arrive, and when."""
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", metavar="FILE", type=pathlib.Path, help="CSV (or gzip): arrival_s, prompt_tokens, output_tokens"
    )
    source.add_argument("--poisson", metavar="RATE", type=_positive, help="arrivals per second of a Poisson process")
    source.add_argument(
        "--replay",
        metavar="FILE",
        type=pathlib.Path,
        help="a decision log: replay its facts through the scheduler and check that it decides the same",
    )
    source.add_argument(
        "--models",
        metavar="FILE",
        type=pathlib.Path,
        help="TOML with [[models]]: name, model, rate (per second) of several models that share the GPUs",
    )
    group.add_argument(
        "--lengths",
        metavar="FILE",
        help="CSV (or gzip) of prompt_tokens, output_tokens to draw from; or "
        "lognormal[:PROMPT_MEDIAN,SIGMA,OUTPUT_MEDIAN,SIGMA]; replaces a trace's own",
    )
    group.add_argument(
        "--length-factor", metavar="X", type=_positive, default=1.0, help="all lengths times X (the paper: 10)"
    )
    group.add_argument("--rate", metavar="RATE", type=_positive, help="stretch a trace's arrivals to RATE per second")
    group.add_argument(
        "--seconds",
        metavar="N",
        type=_positive,
        default=math.inf,
        help="stop the arrivals after N seconds (needed with --poisson)",
    )
    group.add_argument(
        "--variation",
        metavar="CV",
        type=_positive,
        default=1.0,
        help="with --poisson: standard deviation of the times between arrivals by their mean; above 1: bursts",
    )
    group.add_argument(
        "--high-part", metavar="P", type=_probability, help="share of the requests that have high priority, from 0 to 1"
    )
    group.add_argument("--seed", metavar="S", type=int, default=0, help="seed of all random choices (default: 0)")


def add_machines(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the GPUs, the model and the links."""
    group.add_argument("--model", metavar="M", help=f"{', '.join(MODELS)}, or a config.json (default: llama-2-13b)")
    group.add_argument(
        "--gpu", metavar="G", help=f"{', '.join(CARDS)}, or its memory, such as 24GiB (default: a100-40g)"
    )
    group.add_argument(
        "--capacity-bytes", metavar="N", type=_bytes, help="KV bytes of a GPU, instead of --model and --gpu"
    )
    group.add_argument(
        "--bytes-per-token", metavar="N", type=_bytes, help="KV bytes of one token (needed with --capacity-bytes)"
    )
    group.add_argument(
        "--step-ms",
        metavar="MS",
        type=_positive,
        help="duration of every decode step (default: from measured tables)",
    )
    group.add_argument("--gpus", metavar="N", type=_count, help="at most N GPUs (default: no limit)")
    group.add_argument(
        "--slots", metavar="N", type=_count, default=256, help="requests that a GPU runs at once (default: 256)"
    )
    group.add_argument(
        "--wake-s",
        metavar="S",
        type=_not_negative,
        default=0.0,
        help="delay until an activated GPU computes (default: 0)",
    )
    _add_targets(group)
    _add_links(group)


def _add_targets(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--itl-target-ms",
        metavar="T",
        type=_positive,
        help="longest mean time between tokens for each request (default: no limit)",
    )
    group.add_argument(
        "--ttft-target-s",
        metavar="S",
        type=_positive,
        help="time until the first token, or four times as long as the prompt takes alone (default with "
        "--itl-target-ms: 2)",
    )


def _add_links(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--link-rate",
        metavar="BYTES",
        type=_bytes,
        help="bytes a second between GPUs, such as 4GiB; migrations then take time, and memory on both sides "
        "(default: instant)",
    )
    group.add_argument(
        "--machines",
        metavar="N",
        type=_count,
        help="with --gpus and --link-rate: the GPUs are on N machines, and between those requests move as tokens "
        "(default: KV goes between all GPUs)",
    )
    group.add_argument(
        "--machine-link-rate",
        metavar="BYTES",
        type=_bytes,
        help="with --machines: KV goes between machines too, so many bytes a second out of each and into each",
    )
    group.add_argument(
        "--lose-machine-s",
        metavar="S",
        type=_not_negative,
        help="with --machines: the first is lost after S seconds",
    )
    group.add_argument(
        "--failure-rate", metavar="P", type=_part, default=0.0, help="share of the migrations that fail (default: 0)"
    )


def add_scheduler(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the policy and how often it plans."""
    group.add_argument(
        "--policy",
        metavar="P[,P...]",
        help=f"{', '.join(ALL_POLICIES)} (default: {SchedulerConfig().policy}; with --replay: the log's)",
    )
    group.add_argument(
        "--sharing",
        metavar="S[,S...]",
        help="with --models: lending (melld), fixed (without lending), split and even (once), fifo and collated "
        "(swapping whole models) (default: lending,split,collated)",
    )
    group.add_argument(
        "--epoch-ms", metavar="MS", type=_positive, default=100.0, help="period of re-planning (default: 100)"
    )
    group.add_argument(
        "--paper-slots",
        action="store_true",
        help="judge overflow after the scheduler has acted on the epoch, as the paper's time slots do",
    )
    group.add_argument(
        "--retire-after-s",
        metavar="S",
        type=_not_negative,
        help="how long an empty GPU stays awake (default: 0; mell-slo with targets: as long as waking costs more)",
    )


def add_output(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the output."""
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--decision-log",
        metavar="FILE",
        type=pathlib.Path,
        help="write every fact and decision, one JSON object per line (one policy only)",
    )
    group.add_argument(
        "--plot",
        metavar="DIR",
        type=pathlib.Path,
        help="draw the paper's figures 11 to 15 as PNG (needs matplotlib)",
    )


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"not a number of bytes: {text!r} (write 4GiB, 512MiB or 1000000, for example)"
        ) from None
