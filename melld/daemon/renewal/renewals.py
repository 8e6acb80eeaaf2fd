"""The operation behind `melld renew`.

Ensures that there is one renewal at a time, and that it is cancelled if the operator disconnects before the new daemon
serves.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from melld.control.messages import Renew, RenewalStep
from melld.control.server import OpenCall
from melld.control.status import DaemonState
from melld.daemon.renewal.handover import Event, Old
from melld.daemon.renewal.old import OldSide
from melld.errors import MelldError

if TYPE_CHECKING:
    from melld.daemon.renewal.succession import Succession


class NotRenewed(MelldError):
    """The daemon cannot be renewed now."""

    status = 409
    code = "not_renewed"


class Renewals:
    """The renewals of this daemon, one at a time."""

    def __init__(self, daemon: "Succession") -> None:
        self._daemon = daemon
        self.current: OldSide | None = None

    @property
    def is_handed_over(self) -> bool:
        """Return True once another daemon takes the requests."""
        return self.current is not None and self.current.state in (Old.HANDED_OVER, Old.ENDED)

    def call_off(self) -> bool:
        """Cancel a renewal in progress, as this daemon ends; return True if another already takes the requests."""
        if self.current is not None and not self.is_handed_over:
            self.current.happen(Event.STOPPED)
            self.current = None
        return self.current is not None

    async def renew(self, _asked: Renew, call: OpenCall) -> None:
        """Replace this daemon, reporting progress to the operator, until either daemon serves.

        Raises:
            NotRenewed: it cannot be replaced now.
            NotLeft: the handover file cannot be written.
        """
        if self._daemon.condition.state is not DaemonState.READY:
            raise NotRenewed(f"the daemon is {self._daemon.condition.state}: try again once it is ready")
        if self.current is not None:
            raise NotRenewed(f"a renewal is already in progress: {self.current.told().told}")
        if (reason := self._daemon.why_not_renewed()) is not None:
            raise NotRenewed(reason)
        await self._daemon.leave()
        if self.current is not None:  # another began meanwhile
            raise NotRenewed(f"a renewal is already in progress: {self.current.told().told}")
        self.current = side = OldSide(self._daemon, self._over)
        try:
            while True:
                side.news.clear()
                told = side.told()
                await call.say(told)
                if told.step is not RenewalStep.UNDER_WAY:
                    break
                news = asyncio.ensure_future(side.news.wait())
                either: set[asyncio.Future[Any]] = {news, call.left}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if call.left.done():
                    raise ConnectionError
        except ConnectionError:
            if side.state is not Old.SERVING:
                side.happen(Event.CALLED_OFF)

    def _over(self) -> None:
        self.current = None

    def close(self) -> None:
        """Close the channel of a renewal, as this daemon ends."""
        if self.current is not None:
            self.current.close()
