"""Loans: devices that other programs have for as long as they run (`melld run`).

Owns who waits for devices, in which order, and when a loan begins and ends.  A loan is a drain with an owner: `Drains`
empties the workers and knows to whom they are lent.  `lendable` chooses them.

    WAITING ──a device may be lent──► EMPTYING ──its workers have ended──► LENT ──the connection ends──► resumed
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from melld.control.messages import Lend, Loan, LoanStep
from melld.control.status import RESTING, LoanStatus
from melld.driver.drain import Drains, WorkerDrain
from melld.driver.lendable import Lendable, Lot, NothingToLend, Wanted, choose, devices_of
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.life import State
from melld.engine.fleet.place import Place
from melld.ids import WorkerId
from melld.scheduler.roster import OPEN_STATES
from melld.scheduler.view import ClusterView

if TYPE_CHECKING:
    from melld.control.server import OpenCall

log = logging.getLogger("melld.loans")
LOOK_S = 0.2
"""How often a borrower is told how far its loan is, and whether a device has become free is looked at."""


class Loans:
    """All loans of one fleet."""

    def __init__(self, fleet: Fleet, cluster: ClusterView, drains: Drains, clock: Callable[[], float]) -> None:
        self.count = 0
        """Loans begun."""
        self._fleet = fleet
        self._cluster = cluster
        self._drains = drains
        self._clock = clock
        self._line: list[Lend] = []
        self._lent: list[WorkerDrain] = []
        self._ended_s = 0.0

    def status_of(self, worker: WorkerId) -> LoanStatus | None:
        """Return to whom the worker's device is lent; None if it is not."""
        drain = self._drains.by_worker.get(worker)
        if drain is None or (loan := drain.loan) is None:
            return None
        age_s = round(self._clock() - drain.began_s + (loan.held_s or 0.0), 3)
        return LoanStatus(command=loan.command, pid=loan.pid, user=loan.user, age_s=age_s)

    def lent_s(self) -> float:
        """Return for how many seconds workers have been lent, summed, those included in which they emptied."""
        return self._ended_s + sum(self._clock() - drain.began_s for drain in self._lent)

    async def lend(self, asked: Lend, call: "OpenCall") -> None:
        """Lend devices until the borrower is gone, or tell it why none are available.

        If the daemon ends first, its workers end too, and none is resumed.

        Raises:
            NothingToLend, NeverLent: see `choose`; of a borrower that does not wait.
            ConnectionError: the borrower has gone before it had a device.
        """
        if not (lot := await self._chosen(asked, call)):
            return
        drains = [self._drains.lend(one.worker, asked) for one in lot]
        self.count += 1
        self._lent += drains
        with contextlib.suppress(ConnectionError):
            await self._empty(lot, drains, call)
            await asyncio.wait({call.left})
        self._ended_s += sum(self._clock() - drain.began_s for drain in drains)
        self._lent = [drain for drain in self._lent if drain not in drains]
        log.info("%s is back from %s", ", ".join(devices_of(lot)), asked.borrower)
        await asyncio.gather(*(self._drains.resume(one.worker, asked) for one in lot))

    def give(self, borrower: Lend, *, everything: bool = False) -> list[WorkerDrain]:
        """Lend what costs least, or whatever can be lent, until `take_back`, to a borrower without a connection.

        Raises:
            NothingToLend, NeverLent: see `choose`.
        """
        workers = self._workers(held=False)
        lot = [one for one in workers if not one.taken] if everything else choose(workers, Wanted())
        return [self._drains.lend(one.worker, borrower) for one in lot]

    async def take_back(self, borrower: Lend) -> None:
        """Take all workers that this borrower has into service again."""
        lent = [drain.worker for drain in self._drains.by_worker.values() if drain.loan is borrower]
        await asyncio.gather(*(self._drains.resume(worker, borrower) for worker in lent))

    async def _chosen(self, asked: Lend, call: "OpenCall") -> Lot:
        """Return the workers to lend, once it is the borrower's turn; none if it leaves, or waits no longer."""
        if asked.held_s is not None:
            return choose(self._workers(held=True), Wanted(devices=asked.devices, even_last=True))
        wanted = Wanted(asked.count, asked.devices, asked.even_last)
        told, until_s = "", self._clock() + asked.wait_s
        self._line.append(asked)
        try:
            while not call.left.done():
                try:
                    choice = choose(self._workers(held=False), wanted)
                    if self._line[0] is asked:
                        return choice
                    reason = "others are already waiting for a device"
                except NothingToLend as nothing:
                    reason = str(nothing)
                is_over = self._clock() >= until_s
                if is_over and not told:
                    raise NothingToLend(reason)
                if is_over or reason != told:
                    await call.say(Loan(step=LoanStep.REFUSED if is_over else LoanStep.WAITING, reason=reason))
                if is_over:
                    break
                told = reason
                await asyncio.wait({call.left}, timeout=LOOK_S)
        finally:
            self._line = [one for one in self._line if one is not asked]
        return ()

    async def _empty(self, lot: Lot, drains: Sequence[WorkerDrain], call: "OpenCall") -> None:
        """Tell the borrower how far its workers are, until they have ended."""
        places = [self._fleet.places[one.worker] for one in lot]
        workers, uuids = tuple(one.worker for one in lot), tuple(uuid for place in places for uuid in place.slot.uuids)
        loan = Loan(step=LoanStep.EMPTYING, devices=devices_of(lot), uuids=tuple(dict.fromkeys(uuids)), workers=workers)
        emptied = asyncio.ensure_future(all_answered(drains))
        over: set[asyncio.Future[Any]] = {emptied, call.left}
        try:
            while not (emptied.done() or call.left.done()):
                await call.say(_progress(loan, drains))
                await asyncio.wait(over, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if emptied.done():
                await call.say(_progress(loan, drains, LoanStep.LENT))
        finally:
            emptied.cancel()

    def _workers(self, *, held: bool) -> list[Lendable]:
        return [self._lendable(place, held) for place in self._fleet.places.values()]

    def _lendable(self, place: Place, held: bool) -> Lendable:
        """Return what there is to know of a worker; `held`: by the borrower, so only another loan can be in its way."""
        worker = place.slot.worker
        known, drain, taken = self._cluster.workers.get(worker), self._drains.by_worker.get(worker), ""
        if drain is not None:
            taken = f"lent to {drain.loan.borrower}" if drain.loan is not None else "drained by an operator"
        elif place.life.state is State.FAILED and not held:
            taken = f"not available: {place.detail}"
        return Lendable(
            worker=worker,
            devices=place.slot.devices,
            serves=known is not None and known.state in OPEN_STATES and known.offered_slots > 0,
            is_awake=place.state not in RESTING,
            requests=known.count if known is not None else 0,
            kv_bytes=known.used_bytes if known is not None else 0,
            taken=taken,
        )


async def all_answered(drains: Sequence[WorkerDrain]) -> None:
    """Wait until these workers have ended."""
    for drain in drains:
        await drain.answer.wait()


def _progress(loan: Loan, drains: Sequence[WorkerDrain], step: LoanStep = LoanStep.EMPTYING) -> Loan:
    left, moved = sum(len(drain.left) for drain in drains), sum(drain.moved for drain in drains)
    return msgspec.structs.replace(loan, step=step, left=left, moved=moved)
