"""`melld drain`: take a worker out of service, to free its device.

Owns the request and the wording.
"""

import argparse
import math

from melld.cli.asking import ask, describe
from melld.cli.config_flags import add_flag, number_that
from melld.control.messages import Drain, Drained, DrainOutcome

PATIENCE_S = 7 * 86_400.0
"""Longest wait of `--wait`: requests may be long, and the operator has Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument("worker", metavar="WORKER", help="worker from `melld status`; in a cluster, also a machine")
    wait = "wait until it is drained (Ctrl-C stops waiting, not the drain)"
    add_flag(parser, "--wait", wait, action="store_true")
    late = "after S seconds, recompute the remaining requests on other workers; they queue if none has "
    late += "free (default: no deadline)"
    seconds = number_that("must not be below zero", lambda value: 0 <= value < math.inf)
    add_flag(parser, "--deadline S", late, type=seconds)
    describe(
        parser,
        "Take a worker out of service: it gets no new requests, and its running requests move to other workers without "
        "interrupting their streams.  Then its process exits, and its device stays free until `melld resume`.",
        "drained (without --wait: drain started)",
        "not drained (for example, the last worker)",
        "print the report as JSON",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon, wait, and print the report; return the exit code."""
    asked = Drain(worker=arguments.worker, wait=arguments.wait, deadline_s=arguments.deadline)
    wanted = {DrainOutcome.DRAINED} if arguments.wait else {DrainOutcome.DRAINED, DrainOutcome.DRAINING}
    question = asked, PATIENCE_S if arguments.wait else None
    return ask("drain", arguments, question, Drained, Drained.in_words, lambda report: report.outcome in wanted)
