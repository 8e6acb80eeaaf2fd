"""One request to the daemon over its control socket, and its printed answer: code that the operator commands share.

Owns the exit codes and where errors go; the commands own the request and the wording.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from melld.cli import BAD_USAGE, DONE, FAILED, NO_DAEMON
from melld.cli.config_flags import daemon_directories
from melld.control.client import ControlClient, ControlRefused, NoDaemon
from melld.errors import ConfigError

Reply = TypeVar("Reply")


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
        text = ControlClient(daemon_directories(arguments, os.environ)).operate(operation, message, deadline_s)
        reply = msgspec.json.decode(text, type=reply_type)
    except ConfigError as error:
        return _fail(operation, error, BAD_USAGE)
    except NoDaemon as error:
        return _fail(operation, error, NO_DAEMON)
    except (ControlRefused, msgspec.MsgspecError) as error:
        return _fail(operation, error, FAILED)
    print(msgspec.json.format(text, indent=2).decode() if arguments.json else in_words(reply))
    return DONE if is_done(reply) else FAILED


def _fail(operation: str, error: Any, code: int) -> int:
    print(f"melld {operation}: {error}", file=sys.stderr)
    return code
