"""`melld renew`: replace the daemon with newer code or settings, without losing a stream.

Owns the wording and the exit code.  The renewal hangs on this process until the new daemon is serving.
"""

import argparse
import os
import sys

import msgspec

from melld.cli import DONE, FAILED
from melld.cli.asking import NO_ANSWER, describe, failed
from melld.cli.config_flags import daemon_directories
from melld.control.client import ControlClient
from melld.control.messages import Renew, Renewal, RenewalStep

ANSWER_S = 60.0
"""Timeout for the first reply: the old daemon first writes its handover file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    does = (
        "Replace the daemon with a new one that has the same command line, but the code and configuration now on "
        "disk.  It takes over the listening socket and the devices one by one, while the old daemon finishes its "
        "streams.  If it fails to start, the old one keeps serving.  Ctrl-C cancels."
    )
    describe(
        parser,
        does,
        "the new daemon is serving",
        "the old daemon keeps serving (it says why)",
        "the final state",
    )


def run(arguments: argparse.Namespace) -> int:
    """Have the daemon renewed; return the exit code."""
    told = None
    try:
        answer = ControlClient(daemon_directories(arguments, os.environ), ANSWER_S).begin("renew", Renew())
        for line in answer.lines():
            told = msgspec.json.decode(line, type=Renewal)
            print(
                f"melld renew: {told.told}",
                file=sys.stderr if told.step in (RenewalStep.KEPT, RenewalStep.STOPPED) else sys.stdout,
                flush=True,
            )
    except NO_ANSWER as error:
        return failed("renew", error)
    if told is not None and arguments.json:
        print(msgspec.json.encode(told).decode())
    if told is None or told.step is RenewalStep.UNDER_WAY:
        print("melld renew: the daemon is gone: see its log", file=sys.stderr)
    return DONE if told is not None and told.step is RenewalStep.RENEWED else FAILED
