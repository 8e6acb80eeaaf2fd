"""Loans: devices that other programs have for as long as they run (`melld run`).

Owns who waits for devices, in which order, and when a loan begins and ends.  A loan is a drain with an owner: `Drains`
empties the workers and knows to whom they are lent.  `lendable` chooses them.  The workers that models have on a device
are lent together.

    WAITING ──a device may be lent──► EMPTYING ──its workers have ended──► LENT ──the connection ends──► resumed
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from melld.control.messages import Lend, Loan, LoanStep
from melld.control.status import RESTING, LoanStatus
from melld.driver.drain import Drains, WorkerDrain
from melld.driver.lendable import Lendable, Lot, NothingToLend, choose, devices_of
from melld.engine.fleet.life import State
from melld.engine.fleet.place import Place
from melld.ids import WorkerId
from melld.scheduler.roster import OPEN_STATES

if TYPE_CHECKING:
    from melld.control.server import OpenCall

log = logging.getLogger("melld.loans")
LOOK_S = 0.2
"""How often a borrower is told how far its loan is, and whether a device has become free is looked at."""


class Loans:
    """All loans of one daemon."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.drains: list[Drains] = []
        """Of each model."""
        self.count: Counter[Drains] = Counter()
        """Loans begun."""
        self._clock = clock
        self._line: list[Lend] = []
        self._lent: list[Lend] = []
        self._ended_s: defaultdict[Drains, float] = defaultdict(float)

    def status_of(self, worker: WorkerId) -> LoanStatus | None:
        """Return to whom the worker's device is lent; None if it is not."""
        drain = self._of(worker).by_worker.get(worker)
        if drain is None or (loan := drain.loan) is None:
            return None
        age_s = round(self._clock() - drain.began_s + (loan.held_s or 0.0), 3)
        return LoanStatus(command=loan.command, pid=loan.pid, user=loan.user, age_s=age_s)

    def lent_s(self, drains: Drains) -> float:
        """Return for how many seconds these workers have been lent, summed, including those in which they emptied."""
        return self._ended_s[drains] + self._lasted_s(drains, self._lent)

    def _lasted_s(self, drains: Drains, loans: Sequence[Lend]) -> float:
        return sum(self._clock() - drain.began_s for drain in drains.by_worker.values() if drain.loan in loans)

    async def lend(self, asked: Lend, call: "OpenCall") -> None:
        """Lend devices until the borrower is gone, or tell it why none are available.

        If the daemon ends first, its workers end too, and none is resumed.

        Raises:
            NothingToLend, NeverLent: see `choose`; of a borrower that does not wait.
            ConnectionError: the borrower has gone before it had a device.
        """
        if not (lot := await self._chosen(asked, call)):
            return
        drains = [self._of(one.worker).lend(one.worker, asked) for one in lot]
        self.count.update({self._of(one.worker) for one in lot})
        self._lent.append(asked)
        with contextlib.suppress(ConnectionError):
            await self._empty(lot, drains, call)
            await asyncio.wait({call.left})
        log.info("%s is back from %s", ", ".join(devices_of(lot)), asked.borrower)
        for one in self.drains:
            self._ended_s[one] += self._lasted_s(one, [asked])
        self._lent.remove(asked)
        await self.take_back(asked)

    def give(self, borrower: Lend, *, everything: bool = False) -> list[WorkerDrain]:
        """Lend what costs least, or whatever can be lent, until `take_back`, to a borrower without a connection.

        Raises:
            NothingToLend, NeverLent: see `choose`.
        """
        workers = self._workers(held=False)
        lot = [one for one in workers if not one.taken] if everything else choose(workers, borrower)
        return [self._of(one.worker).lend(one.worker, borrower) for one in lot]

    async def take_back(self, borrower: Lend, but: Collection[str] = ()) -> list[Place]:
        """Take the workers that this borrower has into service again, except on these devices; return their places."""
        lent = [(each, drain) for each in self.drains for drain in each.by_worker.values() if drain.loan is borrower]
        lent = [one for one in lent if not set(but) & set(one[1].place.slot.devices)]
        await asyncio.gather(*(each.resume(drain.worker, borrower) for each, drain in lent))
        return [drain.place for _, drain in lent]

    def cover(self, come: Drains) -> None:
        """Lend the workers of a model that has come, too, on devices that are lent."""
        drains = [drain for each in self.drains for drain in each.by_worker.values()]
        loans = {device: drain.loan for drain in drains for device in drain.place.slot.devices}
        for worker, place in come.fleet.places.items():
            if (loan := loans.get(place.slot.devices[0])) is not None:
                come.lend(worker, loan)

    def _of(self, worker: WorkerId) -> Drains:
        return next(each for each in self.drains if worker in each.fleet.places)

    async def _chosen(self, asked: Lend, call: "OpenCall") -> Lot:
        """Return the workers to lend, once it is the borrower's turn; none if it leaves, or waits no longer."""
        if asked.held_s is not None:
            return choose(self._workers(held=True), msgspec.structs.replace(asked, even_last=True))
        told, until_s = "", self._clock() + asked.wait_s
        self._line.append(asked)
        try:
            while not call.left.done():
                try:
                    choice = choose(self._workers(held=False), asked)
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
        uuids = tuple(uuid for drain in drains for uuid in drain.place.slot.uuids)
        workers = tuple(one.worker for one in lot)
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
        each = [(str(number), drains) for number, drains in enumerate(self.drains)]
        return [self._lendable(*one, place, held) for one in each for place in one[1].fleet.places.values()]

    def _lendable(self, model: str, drains: Drains, place: Place, held: bool) -> Lendable:
        """Return what there is to know of a worker; `held`: by the borrower, so only another loan can be in its way."""
        worker = place.slot.worker
        known, drain, taken = drains.cluster.workers.get(worker), drains.by_worker.get(worker), ""
        if drain is not None:
            taken = f"lent to {drain.loan.borrower}" if drain.loan is not None else "drained by an operator"
        elif place.life.state is State.FAILED and drains.fleet.supervisor.owner.wants_all and not held:
            taken = f"not available: {place.detail}"
        return Lendable(
            worker=worker,
            devices=place.slot.devices,
            serves=known is not None and known.state in OPEN_STATES and known.offered_slots > 0,
            is_awake=place.state not in RESTING,
            requests=known.count if known is not None else 0,
            kv_bytes=known.used_bytes if known is not None else 0,
            model=model,
            taken=taken,
        )


async def all_answered(drains: Sequence[WorkerDrain]) -> None:
    """Wait until these workers have ended."""
    for drain in drains:
        await drain.answer.wait()


def _progress(loan: Loan, drains: Sequence[WorkerDrain], step: LoanStep = LoanStep.EMPTYING) -> Loan:
    left, moved = sum(len(drain.left) for drain in drains), sum(drain.moved for drain in drains)
    return msgspec.structs.replace(loan, step=step, left=left, moved=moved)
