"""A loan in `melld run`: waiting for it, and the process that keeps the connection on which it depends.

If the daemon goes first, the program runs on, and the next daemon is told what it holds.
"""

import contextlib
import os
import select
import sys
import time
from collections.abc import Sequence

import msgspec

from melld.cli.asking import NO_ANSWER
from melld.cli.render import duration_text
from melld.control.client import ControlClient, ControlRefused, OpenAnswer
from melld.control.messages import Lend, Loan, LoanStep

AGAIN_S = 0.2
"""How soon the next daemon is looked for."""


class NotLent(Exception):
    """No loan was made; the text says why."""


def say(text: str) -> None:
    """Print a message for the user, next to the program's own output."""
    with contextlib.suppress(OSError):  # standard error is closed
        print(f"melld run: {text}", file=sys.stderr, flush=True)


def wait_lent(answer: OpenAnswer) -> Loan:
    """Wait until devices are lent, showing progress.

    Raises:
        NotLent: none were.
    """
    began_s, told = time.monotonic(), ""
    for line in answer.lines():
        loan = msgspec.json.decode(line, type=Loan)
        match loan.step:
            case LoanStep.REFUSED:
                raise NotLent(loan.reason)
            case LoanStep.LENT:
                say(f"{', '.join(loan.devices)}: free after {duration_text(time.monotonic() - began_s)}")
                return loan
            case LoanStep.WAITING:
                text = f"waiting: {loan.reason}"
            case LoanStep.EMPTYING:
                text = f"draining {', '.join(loan.workers)}: {loan.left} left, {loan.moved} moved"
        if text != told:
            say(text)
        told = text
    raise NotLent("the daemon is gone")


def keep(client: ControlClient, asked: Lend, answer: OpenAnswer, devices: Sequence[str]) -> None:
    """Have a process of its own keep the loan for as long as this one lives, whatever program this one becomes.

    It is no child: a program that waits for all its children would wait for it.
    """
    program = os.pidfd_open(os.getpid())
    if (between := os.fork()) != 0:
        os.waitpid(between, 0)
        os.close(program)
        return
    try:
        os.setsid()  # what the terminal sends is for the program
        if os.fork() == 0:
            for number in (0, 1):  # whoever reads the program's output waits for the program alone
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            _hold(program, client, asked, answer, tuple(devices))
    finally:
        os._exit(0)


def _hold(program: int, client: ControlClient, asked: Lend, answer: OpenAnswer, devices: tuple[str, ...]) -> None:
    """Keep the loan until the program ends; if the daemon goes first, ask the next one for the devices."""
    began_s = time.monotonic()
    while program not in select.select([program, answer.fileno()], [], [])[0]:
        if answer.goes_on():
            continue
        answer.close()
        say("the daemon is gone; the program keeps running, and the next daemon will be asked for its devices")
        told = ""
        while not select.select([program], [], [], AGAIN_S)[0]:
            again = msgspec.structs.replace(asked, devices=devices, held_s=time.monotonic() - began_s)
            try:
                answer = client.begin("lend", again)
            except NO_ANSWER as error:
                if isinstance(error, ControlRefused) and str(error) != told:
                    told = str(error)
                    say(f"the program keeps running without a loan: {told}")
            else:
                say(f"the daemon is back: the program keeps {', '.join(devices)}")
                break
        else:
            break
