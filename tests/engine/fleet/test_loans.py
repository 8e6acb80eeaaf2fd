"""Loans on the daemon below its API: devices are lent and returned under load, and all requests complete."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from melld.control.messages import LoanStep
from melld.control.status import LoanStatus
from melld.decisions.stories import Happened
from melld.driver.drain import LastWorker, WorkerLent
from melld.driver.lendable import NeverLent, NothingToLend
from melld.ids import WorkerId
from tests.engine.fleet.virtual_borrower import ASKED, Borrower
from tests.engine.fleet.virtual_daemon import VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually

W0, W1, W2 = (WorkerId(f"w{index}") for index in range(3))
ALL = msgspec.structs.replace(ASKED, count=2, even_last=True)
FIRST = msgspec.structs.replace(ASKED, devices=("cpu:0",))


def on_a_daemon(workers: int, story: Callable[[VirtualDaemon], Coroutine[Any, Any, None]]) -> None:
    """Play the story, then let every request complete and check all records."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers).start()
        await story(daemon)
        await daemon.finish()
        await daemon.close()

    run_virtually(told)


def test_requests_move_away_and_their_stories_name_the_program() -> None:
    """No stream is cut for a loan, and the story says for whom a request moved."""

    async def story(daemon: VirtualDaemon) -> None:
        requests = [daemon.admit(1, 12) for _ in range(2)]
        await daemon.flush()
        assert {live.worker for live in daemon.fleet.live.values()} == {W0}
        borrower = Borrower(daemon, FIRST)
        loan = await borrower.until(LoanStep.LENT)
        assert (loan.workers, loan.devices, loan.left, loan.moved) == (("w0",), ("cpu:0",), 0, 2)
        assert daemon.drains.by_worker[W0].is_over
        for request in requests:
            [began] = [one for one in daemon.stories.story(request).lines if one.what is Happened.MOVE_BEGAN]
            assert began.reason == "its worker's device is being lent to `train` (pid 7, ann)"
        borrower.leave()

    on_a_daemon(2, story)


@pytest.mark.parametrize("patience", [0, 1, 2, 20])
def test_a_worker_returns_whenever_its_borrower_leaves(patience: int) -> None:
    """The borrower may be killed before, while or after it gets the device."""

    async def story(daemon: VirtualDaemon) -> None:
        daemon.admit(1, 12)
        await daemon.flush()
        borrower = Borrower(daemon, FIRST)
        for _ in range(patience):
            daemon.advance()
            await asyncio.sleep(0.05)
        borrower.leave()
        await daemon.flush()
        await borrower.over
        assert daemon.drains.by_worker == {}
        assert (daemon.driver.loans.count[daemon.drains], daemon.driver.loans.status_of(W0)) == (min(patience, 1), None)
        assert daemon.driver.loans.lent_s(daemon.drains) == pytest.approx(0.05 * patience)

    on_a_daemon(2, story)


def test_only_the_borrower_returns_a_lent_device() -> None:
    """An operator's slip would put a worker on a device that another program fills."""

    async def story(daemon: VirtualDaemon) -> None:
        borrower = Borrower(daemon)
        await borrower.until(LoanStep.LENT)
        for operation in (daemon.drains.resume(W1), daemon.drains.drain(W1, False, 0.0)):
            with pytest.raises(WorkerLent, match=r"w1 is lent to `train` \(pid 7, ann\).*: kill 7"):
                await operation
        with pytest.raises(LastWorker, match="w1: drained"):
            await daemon.drains.drain(W0, False, None)
        await asyncio.sleep(2.0)
        lent = daemon.driver.loans.status_of(W1)
        assert lent is not None
        assert lent == LoanStatus(command="train", pid=7, user="ann", age_s=lent.age_s)
        assert lent.age_s >= 2.0
        borrower.leave()

    on_a_daemon(2, story)


def test_loans_queue_in_order_or_are_refused_at_once() -> None:
    """The first in the queue gets the first device, and a later one cannot snatch it."""

    async def story(daemon: VirtualDaemon) -> None:
        first = Borrower(daemon)
        await first.until(LoanStep.LENT)
        at_once = Borrower(daemon)
        patient, later = (Borrower(daemon, msgspec.structs.replace(ASKED, wait_s=wait_s)) for wait_s in (60.0, 50.0))
        hasty = Borrower(daemon, msgspec.structs.replace(ASKED, wait_s=1.0))
        await daemon.settle()
        assert isinstance(at_once.refused, NothingToLend)
        assert "cpu:1 is lent to `train`" in (await patient.until(LoanStep.WAITING)).reason
        await hasty.until(LoanStep.REFUSED)
        first.leave()
        await patient.until(LoanStep.LENT)
        await later.until(LoanStep.WAITING)
        patient.leave()
        await later.until(LoanStep.LENT)
        later.leave()
        await daemon.settle()

    on_a_daemon(2, story)


def test_the_last_worker_is_lent_on_demand_and_requests_wait() -> None:
    """`--all`: running requests complete, later ones wait and are served once the device is back."""

    async def story(daemon: VirtualDaemon) -> None:
        refused = Borrower(daemon, msgspec.structs.replace(ASKED, count=2))
        await daemon.settle()
        assert isinstance(refused.refused, NeverLent)
        borrower = Borrower(daemon, ALL)
        await borrower.until(LoanStep.LENT)
        daemon.admit(1, 4)
        await daemon.flush()
        await asyncio.sleep(3.0)
        assert [live.worker for live in daemon.fleet.live.values()] == [None]
        borrower.leave()
        await daemon.flush()

    on_a_daemon(2, story)


def test_a_new_daemon_learns_of_loans_before_starting_workers() -> None:
    """The program that outlived the last daemon keeps its devices, even all of them: no worker starts there."""

    async def told(loop: VirtualLoop) -> None:
        daemon = VirtualDaemon(loop, 2)
        held = msgspec.structs.replace(ASKED, devices=("cpu:0", "cpu:1"), held_s=3600.0)
        starting = daemon.spawn(daemon.fleet.supervisor.start())
        borrower = Borrower(daemon, held)
        await borrower.until(LoanStep.LENT)
        assert [one.state for one in daemon.workers() if one.ended is None] == []
        lent = daemon.driver.loans.status_of(W0)
        assert lent is not None
        assert lent.age_s >= 3600.0
        other = Borrower(daemon, msgspec.structs.replace(held, devices=("cpu:0",)))
        await daemon.settle()
        assert isinstance(other.refused, NothingToLend)
        assert not starting.done()
        borrower.leave()
        await daemon.settle()
        for worker in daemon.workers():
            worker.become_ready()
        await daemon.flush()
        await starting
        await daemon.close()

    run_virtually(told)
