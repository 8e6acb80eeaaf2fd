"""`melld resume`: take a drained worker, or one that was given up, into service again.

Owns the asking, the words and the exit codes.
"""

import argparse
import os
import sys

import msgspec

from melld.api.control_client import ControlClient, ControlRefused, NoDaemon
from melld.cli import BAD_USAGE, DONE, FAILED, NO_DAEMON
from melld.cli.config_flags import add_daemon_flags, daemon_directories
from melld.control_messages import Resume, Resumed
from melld.errors import ConfigError

DEADLINE_S = 60.0
"""A process that is just ending is waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = "Take a worker into service again that was drained, is being drained, or was given up."
    parser.epilog = "Exit codes: 0 in service (it may still load), 1 not, 2 bad usage, 3 no daemon to talk to."
    parser.add_argument("worker", metavar="WORKER", help="as `melld status` names it")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_daemon_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask and tell; the exit code."""
    try:
        client = ControlClient(daemon_directories(arguments, os.environ))
        text = client.operate("resume", Resume(worker=arguments.worker), DEADLINE_S)
        answer = msgspec.json.decode(text, type=Resumed)
    except ConfigError as error:
        return _fail(error, BAD_USAGE)
    except NoDaemon as error:
        return _fail(error, NO_DAEMON)
    except (ControlRefused, msgspec.MsgspecError) as error:
        return _fail(error, FAILED)
    print(msgspec.json.format(text, indent=2).decode() if arguments.json else in_words(answer))
    return DONE


def in_words(answer: Resumed) -> str:
    """The answer for people."""
    if answer.started:
        return f"{answer.worker}: starting; `melld status` says when it is ready"
    return f"{answer.worker}: {'in service again' if answer.was_drained else 'was in service'}"


def _fail(error: Exception, code: int) -> int:
    print(f"melld resume: {error}", file=sys.stderr)
    return code
