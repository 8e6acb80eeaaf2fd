"""`melld resume`: return a drained or given-up worker to service.

Owns the request and the wording.
"""

import argparse

from melld.cli.asking import ask, describe
from melld.control.messages import Resume, Resumed

DEADLINE_S = 60.0
"""Long enough for a process that is just ending."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument("worker", metavar="WORKER", help="worker from `melld status`; in a cluster, also a machine")
    does = "Return a worker to service that was drained, is draining, or was given up on."
    describe(parser, does, "in service (it may still be loading the model)", "not", "the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print its answer; return the exit code."""
    return ask("resume", arguments, (Resume(worker=arguments.worker), DEADLINE_S), Resumed, in_words)


def in_words(answer: Resumed) -> str:
    """Return the answer as one line of text."""
    if answer.started:
        return f"{answer.worker}: starting; `melld status` shows when it is ready"
    return f"{answer.worker}: {'back in service' if answer.was_drained else 'was already in service'}"
