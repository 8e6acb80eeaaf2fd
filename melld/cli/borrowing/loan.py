"""A loan in `melld run`: waiting for it, and the connection that it depends on.

If the daemon goes first, the program runs on, and the next daemon is told what it holds.
"""

import contextlib
import sys
import threading
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


class LoanHolder:
    """Keeps the loan's connection, and reclaims the devices from the next daemon if it breaks."""

    def __init__(self, client: ControlClient, asked: Lend, answer: OpenAnswer, devices: Sequence[str]) -> None:
        self._client = client
        self._asked = asked
        self._answer = answer
        self._devices = tuple(devices)
        self._since_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def start(self) -> None:
        """Keep it until `end`."""
        self._thread.start()

    def end(self) -> None:
        """Return the devices."""
        self._over.set()
        self._answer.end()

    def _hold(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(msgspec.MsgspecError), contextlib.closing(self._answer):
                for _ in self._answer.lines():
                    pass
            if not self._over.is_set():
                say("the daemon is gone; the program keeps running, and the next daemon will be asked for its devices")
                self._ask_again()

    def _ask_again(self) -> None:
        told = ""
        while not self._over.wait(AGAIN_S):
            held_s = time.monotonic() - self._since_s
            again = msgspec.structs.replace(self._asked, devices=self._devices, held_s=held_s)
            try:
                self._answer = self._client.begin("lend", again)
            except NO_ANSWER as error:
                if isinstance(error, ControlRefused) and str(error) != told:
                    told = str(error)
                    say(f"the program keeps running without a loan: {told}")
            else:
                say(f"the daemon is back: the program keeps {', '.join(self._devices)}")
                break
        if self._over.is_set():  # it ended meanwhile
            self._answer.end()
