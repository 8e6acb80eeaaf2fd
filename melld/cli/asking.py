"""One request to the daemon over its control socket, and its printed answer: code that the operator commands share.

Owns the exit codes and where errors go; the commands own the request and the wording.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from melld.cli import BAD_USAGE, DONE, FAILED, NO_DAEMON
from melld.cli.config_flags import add_daemon_flags, daemon_directories
from melld.control.client import ControlClient, ControlRefused, NoDaemon
from melld.errors import ConfigError

Reply = TypeVar("Reply")
NO_ANSWER = (ConfigError, NoDaemon, ControlRefused, msgspec.MsgspecError)


def describe(parser: argparse.ArgumentParser, does: str, done: str, failed: str, as_json: str) -> None:
    """Add a description, the exit codes 0 and 1, `--json` and the daemon's flags to `parser`."""
    parser.description = does
    parser.epilog = f"Exit codes: 0 {done}, 1 {failed}, 2 bad usage, 3 no daemon running."
    parser.add_argument("--json", action="store_true", help=f"print {as_json}")
    add_daemon_flags(parser)


def daemon_of(arguments: argparse.Namespace) -> ControlClient:
    """Return a client of the daemon that the flags of `describe` name."""
    return ControlClient(daemon_directories(arguments, os.environ))


def ask(
    operation: str,
    arguments: argparse.Namespace,
    question: tuple[msgspec.Struct, float | None],
    reply_type: type[Reply],
    in_words: Callable[[Reply], str],
    is_done: Callable[[Reply], bool] = lambda _: True,
) -> int:
    """Send `question` (a message and its deadline in seconds), print the answer, and return the exit code."""
    message, deadline_s = question
    try:
        text = daemon_of(arguments).operate(operation, message, deadline_s)
        reply = msgspec.json.decode(text, type=reply_type)
    except NO_ANSWER as error:
        return failed(operation, error)
    except UnicodeEncodeError:  # of the question: bytes that the terminal's encoding lacks stand as surrogates in it
        print(f"melld {operation}: a name is not valid in this terminal's encoding", file=sys.stderr)
        return BAD_USAGE
    print(msgspec.json.format(text, indent=2).decode() if arguments.json else in_words(reply))
    return DONE if is_done(reply) else FAILED


def failed(operation: str, error: Exception) -> int:
    """Print why the daemon's answer is missing, and return the exit code."""
    print(f"melld {operation}: {error}", file=sys.stderr)
    return {ConfigError: BAD_USAGE, NoDaemon: NO_DAEMON}.get(type(error), FAILED)
