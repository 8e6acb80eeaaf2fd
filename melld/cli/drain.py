"""`melld drain`: take a worker out of service, so that its device is free for something else.

Owns the question and the words.
"""

import argparse
import math

from melld.cli.asking import ask
from melld.cli.config_flags import add_daemon_flags
from melld.control.messages import Drain, Drained, DrainOutcome

PATIENCE_S = 7 * 86_400.0
"""How long `--wait` waits: requests may be long, and Ctrl-C is at hand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = (
        "Take a worker out of service: it gets no new requests, those that it runs are moved to others while their "
        "clients read on, and when it is empty its process ends and its device is free, until `melld resume`."
    )
    parser.epilog = (
        "Exit codes: 0 drained (without --wait: begun), 1 not drained, such as the last worker, 2 bad usage, "
        "3 no daemon to talk to."
    )
    parser.add_argument("worker", metavar="WORKER", help="as `melld status` names it")
    parser.add_argument("--wait", action="store_true", help="return when it is drained (Ctrl-C ends the waiting only)")
    parser.add_argument(
        "--deadline",
        metavar="S",
        type=_seconds,
        help="what still runs there after S seconds goes on elsewhere from its tokens, and waits where there is no "
        "room (default: the drain takes what it takes)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_daemon_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, wait and tell; the exit code."""
    asked = Drain(worker=arguments.worker, wait=arguments.wait, deadline_s=arguments.deadline)
    wanted = {DrainOutcome.DRAINED} if arguments.wait else {DrainOutcome.DRAINED, DrainOutcome.DRAINING}
    question = asked, PATIENCE_S if arguments.wait else None
    return ask("drain", arguments, question, Drained, Drained.in_words, lambda report: report.outcome in wanted)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must not be below zero: {text}")
    return value
