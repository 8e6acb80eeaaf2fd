"""`melld load`: have a model loaded before it is asked.

Owns the request and the wording.
"""

import argparse

from melld.cli.asking import ask
from melld.cli.config_flags import add_daemon_flags
from melld.control.messages import Load
from melld.control.status import ModelState, ModelStatus

PATIENCE_S = 86_400.0
"""Longest wait: a load may take minutes, and an operator has Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = "Load one of several models, and return once it can be asked."
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add what loading and unloading have in common."""
    parser.epilog = "Exit codes: 0 done, 1 not done (the daemon says why), 2 bad usage, 3 no daemon to talk to."
    parser.add_argument("model", metavar="NAME", help="as `melld models` lists it")
    parser.add_argument("--json", action="store_true", help="print the model's status as JSON")
    add_daemon_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Have the model loaded; return the exit code."""
    question = Load(model=arguments.model), PATIENCE_S
    return ask("load", arguments, question, ModelStatus, in_words, lambda one: one.state is ModelState.LOADED)


def in_words(status: ModelStatus) -> str:
    """Return the model's state in one line."""
    return f"{status.model}: {status.state}{f' ({status.reason})' if status.reason else ''}"
