"""Cases of several models that random histories seldom reach, on the same virtual town."""

import asyncio

import pytest

from melld.driver.lendable import NothingToLend
from melld.errors import RequestTooLarge
from melld.ids import ModelName, WorkerId
from melld.landlord.instance import InstanceState
from tests.daemon.virtual_town import Borrower, Town
from tests.engine.fleet.virtual_borrower import ASKED
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually

A, B = ModelName("a"), ModelName("b")


def worker_of(town: Town, name: str) -> Borrower:
    (found,) = [one for one in town.workers if one.name == name]
    assert isinstance(found, Borrower)
    return found


async def answered(town: Town) -> None:
    """Check that every request was answered."""
    for _ in range(40):
        await town.rest()
        for worker in town.workers:
            worker.step()


def test_a_worker_that_dies_while_freeing_its_memory_is_freed_once() -> None:
    """It has just reported that it dozes; its memory soon belongs to others and must not be freed again."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=20, keep_alive_s=1.0, dozes=True).start()
        town.call(A, 3, 2)
        await answered(town)
        await asyncio.sleep(1.5)
        await town.settle()
        worker = worker_of(town, "a0")
        while worker.inbox:
            worker.obey()
        while worker.outbox:
            worker.deliver()
        await asyncio.sleep(0.04)
        worker.die()
        town.call(A, 3, 2)
        town.call(B, 3, 2)
        for _ in range(20):
            await asyncio.sleep(0.01)
            await town.rest()
            town.check()
        await town.finish()
        assert town.shell.tenants[A].loads == 2, "at the start, and since"
        await town.close()

    run_virtually(history)


async def short_of_memory(loop: VirtualLoop) -> Town:
    """Return a town where unloaded model B is called while A's answers hold the memory that it needs."""
    town = await Town(loop, 2, 1, granules=14).start()
    town.spawn(town.shell.unload(town.models[B], now=False))
    for _ in range(3):
        await town.rest()
        await asyncio.sleep(0.1)
    town.call(A, 3, 9)
    town.call(A, 3, 9)
    await town.rest()
    await answered(town)
    town.call(B, 1, 2)
    await town.settle()
    return town


def test_a_load_that_fails_at_once_withdraws_its_offer() -> None:
    """Else its scheduler places requests where nothing loads the model and no memory was promised."""

    async def history(loop: VirtualLoop) -> None:
        town = await short_of_memory(loop)
        b0 = WorkerId("b0")
        assert town.states()[b0] is InstanceState.CLEARING
        town.daemons[B].fleet.stop_worker(b0, stay_out=True)
        worker_of(town, "a0").die()
        await asyncio.sleep(0.1)
        town.check()
        await town.close()

    run_virtually(history)


def test_a_client_that_leaves_cancels_its_wait_for_memory() -> None:
    """Else another model would be unloaded for nobody."""

    async def history(loop: VirtualLoop) -> None:
        town = await short_of_memory(loop)
        b, tenant = town.daemons[B], town.shell.tenants[B]
        assert town.states()[WorkerId("b0")] is InstanceState.CLEARING
        assert tenant.take_load(town.shell.landlord.instances).waiting == 1
        b.leave(*b.open)
        assert tenant.take_load(town.shell.landlord.instances).waiting == 0
        await town.finish()
        await town.close()

    run_virtually(history)


def test_a_model_with_no_keep_alive_serves_its_first_call() -> None:
    """It is not unloaded again while the call that loaded it becomes a request."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 3, 1, granules=11, keep_alive_s=0.0).start()
        town.reading_s = 1.0
        last = town.names[-1]
        assert town.models[last].serving is None, "there was no room for it at the start"
        town.call(last, 1, 1)
        while not town.daemons[last].finished:
            await answered(town)
            await asyncio.sleep(0.1)
        assert town.shell.tenants[last].loads == 1
        await town.close()

    run_virtually(history)


@pytest.mark.parametrize("before", ["loaded", "unloaded", "pinned one was gone"])
def test_a_request_that_never_fits_beside_a_pinned_model_is_refused(before: str) -> None:
    """At once, and those behind it are served."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=14, keep_alive_s=1.0, pinned=True).start()
        if before == "unloaded":
            await asyncio.sleep(3.0)
            await town.rest()
            await asyncio.sleep(0.1)  # its memory is freed
        elif before == "pinned one was gone":
            worker_of(town, "a0").die()
            town.call(B, 1, 2)
            for _ in range(12):
                await answered(town)
                await asyncio.sleep(0.1)
        await town.rest()
        assert town.states()[WorkerId("a0")] is InstanceState.READY
        assert (town.states()[WorkerId("b0")] is InstanceState.STOPPED) is (before == "unloaded")
        b, before_s = town.daemons[B], loop.time()
        finished = len(b.finished)
        town.call(B, 6, 2)
        town.call(B, 1, 2)
        while not ((b.errors or town.refused) and len(b.finished) > finished) and loop.time() - before_s < 5.0:
            await answered(town)
            await asyncio.sleep(0.1)
        assert len(b.finished) == finished + 1, "the small one is answered"
        assert [type(error) for error in (*town.refused, *b.errors.values())] == [RequestTooLarge]
        await town.close()

    run_virtually(history)


def test_a_model_that_never_fits_beside_a_pinned_one_is_refused() -> None:
    """With the arithmetic, and without waiting until a deadline."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=9, pinned=True).start()
        await asyncio.sleep(0.5)
        why = town.models[B].why_closed()
        assert why is not None
        assert "b0 takes 0 MiB of the 0 MiB that d0 may hold, and a, pinned, 0 MiB" in why
        await town.close()

    run_virtually(history)


@pytest.mark.parametrize("has_dozed", [False, True])
def test_an_unload_during_the_start_of_a_doze_completes(has_dozed: bool) -> None:
    """The operator hears of it when the process is gone."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=20, keep_alive_s=1.0, dozes=True).start()
        await asyncio.sleep(1.5)
        worker = worker_of(town, "a0")
        assert town.states()[WorkerId("a0")] is InstanceState.LEAVING
        while has_dozed and worker.inbox:
            worker.obey()
        while worker.outbox:
            worker.deliver()
        unloading = asyncio.ensure_future(town.shell.unload(town.models[A], now=False))
        for _ in range(4):
            await town.rest()
            await asyncio.sleep(0.1)
        assert unloading.done()
        assert worker.ended is not None
        assert town.states()[WorkerId("a0")] is InstanceState.STOPPED
        town.check()
        await town.close()

    run_virtually(history)


def test_an_unload_does_not_load_the_model_on_another_device() -> None:
    """Running requests end where they are, since the operator wants the memory; a waiting call reloads it."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 2).start()
        town.call(B, 1, 3)
        await town.rest()
        unloading = asyncio.ensure_future(town.shell.unload(town.models[B], now=False))
        await town.settle()
        assert [one.worker for one in town.daemons[B].fleet.live.values()] == ["b0"]
        await answered(town)
        await asyncio.sleep(1.0)
        await answered(town)
        assert unloading.done()
        assert town.shell.tenants[B].loads == 1, "at the start"
        town.call(B, 1, 2)
        await town.finish()
        assert town.shell.tenants[B].loads > 1
        await town.close()

    run_virtually(history)


def test_an_operator_s_resume_does_not_undo_the_landlord_s_emptying() -> None:
    """Else an unload, or a model that waits for the place, waits as long as new requests come."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1).start()
        b, b0 = town.daemons[B], WorkerId("b0")
        town.call(B, 1, 3)
        await town.rest()
        unloading = asyncio.ensure_future(town.shell.unload(town.models[B], now=False))
        await town.settle()
        await b.drains.resume(b0)
        town.call(B, 1, 2)
        await town.settle()
        assert [one.worker for one in b.fleet.live.values()] == [b0, None]
        await town.finish()
        assert unloading.done()
        assert town.shell.tenants[B].loads == 2, "at the start, and for what came meanwhile"
        await town.close()

    run_virtually(history)


@pytest.mark.parametrize("is_down", [False, True])
def test_a_lone_model_shares_its_device_when_another_comes(is_down: bool) -> None:
    """Its streams go on while the other is loaded beside it, and from then on the Landlord governs its worker."""

    async def history(loop: VirtualLoop) -> None:
        town = Town(loop, 2, 1, granules=60, alone=True)
        starting = asyncio.ensure_future(town.adopt())
        await asyncio.sleep(0)
        town = await starting
        a, b = town.daemons[A], town.daemons[B]
        assert town.states()[WorkerId("a0")] is InstanceState.READY
        town.call(A, 3, 9)
        await town.rest()
        worker_of(town, "a0").step()
        if is_down:
            worker_of(town, "a0").die()
        town.call(B, 3, 5)
        await town.finish()
        assert (len(a.finished), len(b.finished)) == (1, 1)
        assert town.shell.tenants[A].loads == is_down
        town.check()
        await town.close()
        await a.close()

    run_virtually(history)


def test_a_device_is_lent_with_the_workers_of_all_models() -> None:
    """What runs there ends or moves, each model is served elsewhere, and the device is theirs again afterwards."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 3, 2, granules=20).start()
        for name in town.names:
            town.call(name, 2, 9)
        await town.rest()
        lent = town.loans.give(ASKED)
        devices = {device for drain in lent for device in drain.place.slot.devices}
        assert (len(lent), len(devices)) == (3, 1)
        with pytest.raises(NothingToLend):
            town.loans.give(ASKED)
        for name in town.names:
            town.call(name, 2, 2)
        await town.finish()
        assert all(drain.is_over and drain.place.process is None for drain in lent)
        there = await town.loans.take_back(ASKED)
        assert {place.slot.worker for place in there} == {drain.worker for drain in lent}
        town.loans.give(ASKED)
        await town.finish()
        await town.close()

    run_virtually(history)


def test_a_model_that_comes_stays_off_a_device_that_is_lent() -> None:
    """It would load beside the program that has the device."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 2, granules=20).start()
        come = town.loans.drains.pop()
        lent = {device for drain in town.loans.give(ASKED) for device in drain.place.slot.devices}
        town.loans.drains.append(come)
        town.loans.cover(come)
        assert {device for drain in come.by_worker.values() for device in drain.place.slot.devices} == lent
        await town.loans.take_back(ASKED)
        assert not come.by_worker
        await town.finish()
        await town.close()

    run_virtually(history)
