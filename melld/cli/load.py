"""`melld load`: have a model loaded before it is asked.

Owns the request and the wording.
"""

import argparse

from melld.cli.asking import ask, describe
from melld.control.messages import Load
from melld.control.status import ModelState, ModelStatus

PATIENCE_S = 86_400.0
"""Longest wait: a load may take minutes, and an operator has Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    takes_model(parser, "Load one of several models, and return once it can be asked.")


def takes_model(parser: argparse.ArgumentParser, does: str) -> None:
    """Describe a command that does something with one model."""
    parser.add_argument("model", metavar="NAME", help="as `melld models` lists it")
    describe(parser, does, "done", "not done (the daemon says why)", "the model's status as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Have the model loaded; return the exit code."""
    question = Load(model=arguments.model), PATIENCE_S
    return ask("load", arguments, question, ModelStatus, in_words, lambda one: one.state is ModelState.LOADED)


def in_words(status: ModelStatus) -> str:
    """Return the model's state in one line."""
    return f"{status.model}: {status.state}{f' ({status.reason})' if status.reason else ''}"
