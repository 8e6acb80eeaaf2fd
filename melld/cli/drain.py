"""`melld drain`: take a worker out of service, to free its device.

Owns the request and the wording.
"""

import argparse
import math

from melld.cli.asking import ask
from melld.cli.config_flags import add_daemon_flags
from melld.control.messages import Drain, Drained, DrainOutcome

PATIENCE_S = 7 * 86_400.0
"""Longest wait of `--wait`: requests may be long, and the operator has Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = (
        "Take a worker out of service: it gets no new requests, its running requests move to other workers while their "
        "streams go on, and once it is empty its process ends and its device is free, until `melld resume`."
    )
    parser.epilog = (
        "Exit codes: 0 drained (without --wait: started), 1 not drained (the last worker, for example), 2 bad usage, "
        "3 no daemon to talk to."
    )
    parser.add_argument("worker", metavar="WORKER", help="as `melld status` names it; in a cluster also a machine")
    parser.add_argument(
        "--wait", action="store_true", help="return once it is drained (Ctrl-C stops the wait, not the drain)"
    )
    parser.add_argument(
        "--deadline",
        metavar="S",
        type=_seconds,
        help="after S seconds, recompute the remaining requests elsewhere from their tokens; they queue if there "
        "is no room (default: no deadline)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_daemon_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon, wait, and print the report; return the exit code."""
    asked = Drain(worker=arguments.worker, wait=arguments.wait, deadline_s=arguments.deadline)
    wanted = {DrainOutcome.DRAINED} if arguments.wait else {DrainOutcome.DRAINED, DrainOutcome.DRAINING}
    question = asked, PATIENCE_S if arguments.wait else None
    return ask("drain", arguments, question, Drained, Drained.in_words, lambda report: report.outcome in wanted)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must not be below zero: {text}")
    return value
