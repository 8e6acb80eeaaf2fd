"""Cases of several models that random histories seldom meet, on the same virtual town."""

import asyncio
from typing import Any

from melld.ids import ModelName, WorkerId
from tests.daemon.virtual_town import Borrower, Town
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually

A, B = ModelName("a"), ModelName("b")


def worker_of(town: Town, name: str) -> Borrower:
    (found,) = [one for one in town.workers if one.name == name]
    assert isinstance(found, Borrower)
    return found


async def answered(town: Town) -> None:
    """All that was asked is answered."""
    for _ in range(40):
        await town.rest()
        for worker in town.workers:
            worker.step()


def test_a_worker_that_dies_as_its_memory_is_freed_is_freed_once() -> None:
    """It has just said that it dozes; what it had is soon another's, and must not be freed again."""

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
        assert town.shell.loads[A] == 2, "at the start, and since"
        await town.close()

    run_virtually(history)


def test_a_model_that_is_kept_for_no_time_serves_its_first_call() -> None:
    """It is not unloaded again while the call that it was loaded for becomes a request."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 3, 1, granules=11, keep_alive_s=0.0).start()
        town.reading_s = 1.0
        last = town.names[-1]
        assert town.models[last].serving is None, "there was no room for it at the start"
        town.call(last, 1, 1)
        while not town.daemons[last].finished:
            await answered(town)
            await asyncio.sleep(0.1)
        assert town.shell.loads[last] == 1
        await town.close()

    run_virtually(history)
