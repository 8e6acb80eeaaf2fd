"""`melld drain`: take a worker out of service, so that its device is free for something else.

Owns the asking, the words and the exit codes.
"""

import argparse
import math
import os
import sys

import msgspec

from melld.api.control_client import ControlClient, ControlRefused, NoDaemon
from melld.cli import BAD_USAGE, DONE, FAILED, NO_DAEMON
from melld.cli.config_flags import add_daemon_flags, daemon_directories
from melld.control_messages import Drain, Drained, DrainOutcome
from melld.errors import ConfigError

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
    try:
        client = ControlClient(daemon_directories(arguments, os.environ))
        text = client.operate("drain", asked, PATIENCE_S if arguments.wait else None)
        report = msgspec.json.decode(text, type=Drained)
    except ConfigError as error:
        return _fail(error, BAD_USAGE)
    except NoDaemon as error:
        return _fail(error, NO_DAEMON)
    except (ControlRefused, msgspec.MsgspecError) as error:
        return _fail(error, FAILED)
    print(msgspec.json.format(text, indent=2).decode() if arguments.json else report.in_words())
    begun = report.outcome is DrainOutcome.DRAINING and not arguments.wait
    return DONE if begun or report.outcome is DrainOutcome.DRAINED else FAILED


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must not be below zero: {text}")
    return value


def _fail(error: Exception, code: int) -> int:
    print(f"melld drain: {error}", file=sys.stderr)
    return code
