"""`melld unload`: free the memory of a model.

Owns the request.
"""

import argparse

from melld.cli.asking import ask
from melld.cli.load import PATIENCE_S, in_words, takes_model
from melld.control.messages import Unload
from melld.control.status import ModelStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument("--now", action="store_true", help="end its running requests with an error immediately")
    takes_model(
        parser,
        "Unload one of several models once its running requests finish; the next request reloads it.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Have the model unloaded; return the exit code."""
    question = Unload(model=arguments.model, now=arguments.now), PATIENCE_S
    return ask("unload", arguments, question, ModelStatus, in_words)
