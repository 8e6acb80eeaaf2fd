"""`melld run -- COMMAND`: run a program on devices that the daemon lends it for as long as it runs.

Owns the flags and the exit codes.  The loan ends with the program, and with this process, however that ends.
"""

import argparse
import getpass
import os
import shlex
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from melld.cli import BAD_USAGE
from melld.cli.asking import NO_ANSWER, daemon_of
from melld.cli.borrowing.loan import NotLent, keep_lent, say, wait_lent
from melld.cli.borrowing.program import environment_of, run_program
from melld.cli.config_flags import add_daemon_flags, add_flag, number_that
from melld.control.messages import Lend
from melld.printable import printable

NOT_LENT, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
"""Exit codes for a program that did not run, as in `env`, `timeout` and `docker run`."""
LONGEST_COMMAND = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.usage = "melld run [--gpus N | --device DEVICES] [--wait SECONDS] [--all] -- COMMAND ..."
    parser.description = (
        "Run a program on one of the daemon's devices.  The device's requests move to other workers without "
        "interrupting streams; once it is empty, the program starts with CUDA_VISIBLE_DEVICES set (on CPU devices, "
        "only MELLD_DEVICES).  When the program exits, the worker restarts."
    )
    parser.epilog = (
        "Exit codes: the program's own, or 128+n if signal n killed it; 2 bad usage, 125 no device lent, 126 program "
        "not executable, 127 program not found."
    )
    which = parser.add_mutually_exclusive_group()
    count = number_that("must be 1 or more", lambda value: value >= 1, int)
    add_flag(which, "--gpus N", "number of devices; picks those cheapest to drain (default: 1)", type=count, default=1)
    add_flag(which, "--device DEVICES", "specific devices, as named by `melld status`: cuda:1 or cuda:0,1", default="")
    seconds = number_that("must not be below zero", lambda value: 0 <= value < float("inf"))
    patience = "how long to wait for a device (default: 0)"
    add_flag(parser, "--wait SECONDS", patience, type=seconds, default=0)
    add_flag(parser, "--all", "lend even the last worker in service; new requests then wait", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the program to run")
    add_daemon_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Borrow the devices, run the program, and return its exit code."""
    dashes, *command = arguments.command or [""]
    if dashes != "--" or not command:
        say(_usage(dashes))
        return BAD_USAGE
    if shutil.which(command[0]) is None:
        say(f"program not found: {command[0]!r}")
        return NOT_FOUND
    asked = Lend(
        command=_shown(command),
        pid=os.getpid(),
        user=_user(),
        count=arguments.gpus,
        devices=tuple(_named(arguments.device)),
        even_last=arguments.all,
        wait_s=arguments.wait,
    )
    try:
        client = daemon_of(arguments)
        answer = client.begin("lend", asked)
        loan = wait_lent(answer)
    except (*NO_ANSWER, NotLent) as error:
        say(str(error))
        return NOT_LENT
    kept = client, answer, msgspec.structs.replace(asked, devices=loan.devices)
    keeper = threading.Thread(target=keep_lent, args=kept, daemon=True)
    try:
        return run_program(command, environment_of(loan, os.environ), keeper.start)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return NOT_EXECUTABLE


def _usage(word: str) -> str:
    if word in ("", "--"):
        return "name the program to run: melld run -- COMMAND ..."
    return f"is {word!r} a model? did you mean 'serve'?  Is it a program? melld run -- {word}"


def _named(devices: str) -> Sequence[str]:
    """Return `cuda:0,1` as `cuda:0` and `cuda:1`."""
    kind, _, numbers = devices.partition(":")
    if not numbers:
        return [devices] if devices else []
    return [f"{kind}:{number.strip()}" for number in numbers.split(",")]


def _shown(command: Sequence[str]) -> str:
    """Return the part of the command that others may see, program and script: the rest may be secret."""
    script = [word for word in command[1:2] if not word.startswith("-") and "=" not in word]
    return printable(shlex.join([Path(command[0]).name, *script]))[:LONGEST_COMMAND]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return str(os.getuid())
