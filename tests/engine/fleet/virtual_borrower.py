"""A program that borrows a device of the virtual daemon."""

import asyncio

import msgspec

from melld.control.messages import Lend, Loan, LoanStep
from melld.errors import MelldError
from tests.engine.fleet.virtual_daemon import VirtualDaemon

ASKED = Lend(command="train", pid=7, user="ann")


class Borrower:
    """A client that borrows until it leaves; records what it heard, or why it was refused."""

    def __init__(self, daemon: VirtualDaemon, asked: Lend = ASKED) -> None:
        self.heard: list[Loan] = []
        self.left: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.refused: MelldError | None = None
        self._daemon = daemon
        self.over = daemon.spawn(self._borrow(asked))

    async def _borrow(self, asked: Lend) -> None:
        try:
            await self._daemon.driver.loans.lend(asked, self)  # type: ignore[arg-type]
        except ConnectionError:
            pass
        except MelldError as error:
            self.refused = error

    async def say(self, message: msgspec.Struct) -> None:
        if self.left.done():
            raise ConnectionResetError
        assert isinstance(message, Loan)
        self.heard.append(message)

    def leave(self) -> None:
        """Close the connection, however the program ends."""
        if not self.left.done():
            self.left.set_result(b"")

    async def until(self, step: LoanStep) -> Loan:
        """Run the daemon until the loan reaches this state."""
        for _ in range(100):
            if self.heard and self.heard[-1].step is step:
                return self.heard[-1]
            await self._daemon.flush()
            await asyncio.sleep(0.1)
        raise AssertionError(f"{self.heard}, {self.refused}")
