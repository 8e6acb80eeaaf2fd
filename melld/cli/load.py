"""`melld load`: load a model ahead of its first request.

Owns the request and the wording.
"""

import argparse
from pathlib import Path

from melld.cli.asking import ask, describe
from melld.control.messages import Load
from melld.control.status import ModelState, ModelStatus

PATIENCE_S = 86_400.0
"""Longest wait: a load may take minutes, and an operator has Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    does = "Load one of several models, and return once it can serve."
    parser.add_argument("--name", help="add the model at this path under this name, until it is unloaded")
    takes_model(parser, does, " or, with --name, a path or a Hugging Face name")


def takes_model(parser: argparse.ArgumentParser, does: str, or_else: str = "") -> None:
    """Describe a command that takes one model."""
    parser.add_argument("model", metavar="NAME", help=f"model name as listed by `melld models`{or_else}")
    describe(parser, does, "done", "not done (the daemon says why)", "the model's status as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Have the model loaded; return the exit code."""
    load = Load(model=arguments.model)
    if arguments.name is not None:
        here = Path(arguments.model)  # the daemon may run elsewhere
        load = Load(model=arguments.name, path=str(here.resolve()) if here.exists() else arguments.model)
    question = load, PATIENCE_S
    return ask("load", arguments, question, ModelStatus, in_words, lambda one: one.state is ModelState.LOADED)


def in_words(status: ModelStatus) -> str:
    """Return the model's state in one line."""
    return f"{status.model}: {status.state}{f' ({status.reason})' if status.reason else ''}"
