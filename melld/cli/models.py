"""`melld models`: the served models, their states, and where they run.

Owns the table; the daemon's status has the facts.
"""

import argparse

import msgspec

from melld.cli import DONE
from melld.cli.asking import NO_ANSWER, daemon_of, describe, failed
from melld.control.status import DaemonStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    does = "List the served models.  Loaded ones respond immediately; others are loaded by their first request."
    describe(parser, does, "shown", "the daemon returned no status", "`served` of docs/status-schema.md")


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and list its models; return the exit code."""
    try:
        status = msgspec.json.decode(daemon_of(arguments).status(), type=DaemonStatus)
    except NO_ANSWER as error:
        return failed("models", error)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(status.served), indent=2).decode())
        return DONE
    from melld.cli.status_tables import model_table, plain_console

    plain_console().print(model_table(status))
    return DONE
