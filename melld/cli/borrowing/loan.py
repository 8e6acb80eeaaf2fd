"""A loan in `melld run`: waiting for it, and the connection that it depends on.

If the daemon goes first, the program runs on, and the next daemon is told what it holds.
"""

import contextlib
import sys
import time

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
    """Wait until devices are lent, showing progress; close the connection on failure.

    Raises:
        NotLent: none were.
    """
    began_s, told = time.monotonic(), ""
    with contextlib.ExitStack() as unless_lent:
        unless_lent.callback(answer.close)
        for line in answer.lines():
            loan = msgspec.json.decode(line, type=Loan)
            match loan.step:
                case LoanStep.REFUSED:
                    raise NotLent(loan.reason)
                case LoanStep.LENT:
                    say(f"{', '.join(loan.devices)}: free after {duration_text(time.monotonic() - began_s)}")
                    unless_lent.pop_all()
                    return loan
                case LoanStep.WAITING:
                    text = f"waiting: {loan.reason}"
                case LoanStep.EMPTYING:
                    text = f"draining {', '.join(loan.workers)}: {loan.left} left, {loan.moved} moved"
            if text != told:
                say(text)
            told = text
        raise NotLent("the daemon is gone")


def keep_lent(client: ControlClient, answer: OpenAnswer, lent: Lend) -> None:
    """Keep the loan's connection, and ask the next daemon for the same devices if it breaks, until this process ends.

    The end of the process is what returns the devices: it is to run in a thread that dies with it.
    """
    since_s = time.monotonic()
    while True:
        with contextlib.suppress(msgspec.MsgspecError), contextlib.closing(answer):
            for _ in answer.lines():
                pass
        say("the daemon is gone; the program keeps running, and the next daemon will be asked for its devices")
        answer = _lent_again(client, lent, since_s)
        say(f"the daemon is back: the program keeps {', '.join(lent.devices)}")


def _lent_again(client: ControlClient, lent: Lend, since_s: float) -> OpenAnswer:
    told = ""
    while True:
        time.sleep(AGAIN_S)
        try:
            return client.begin("lend", msgspec.structs.replace(lent, held_s=time.monotonic() - since_s))
        except NO_ANSWER as error:
            if isinstance(error, ControlRefused) and str(error) != told:
                told = str(error)
                say(f"the program keeps running without a loan: {told}")
