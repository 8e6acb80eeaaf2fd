"""When idle workers sleep, and when their processes end."""

import asyncio

from melld.control.status import WorkerState
from melld.driver.idle import LOOK_S
from melld.engine.fleet.owner import Owner
from tests.engine.fleet.virtual_daemon import REST, VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually
from tests.serve.offline_daemon import W0

MARGIN_S = 2 * LOOK_S


def test_a_worker_sleeps_and_ends_after_its_delays() -> None:
    """The time asleep counts from when it fell asleep, and an operator who waits for the GPU reads when it is free."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=1).start()
        place = daemon.fleet.places[W0]
        await asyncio.sleep(REST.sleep_after_s - MARGIN_S)
        assert place.state is WorkerState.READY
        await asyncio.sleep(2 * MARGIN_S)
        assert place.state is WorkerState.ASLEEP
        await asyncio.sleep(LOOK_S)
        assert daemon.idle.outlook(W0).startswith("its process exits in ")
        await asyncio.sleep(REST.stop_after_s - 3 * MARGIN_S)
        assert place.state is WorkerState.ASLEEP
        await asyncio.sleep(5 * MARGIN_S)
        assert place.state not in (WorkerState.READY, WorkerState.ASLEEP)
        assert daemon.idle.outlook(W0) == ""
        await daemon.close()

    run_virtually(told)


def test_a_worker_that_an_owner_stops_only_sleeps() -> None:
    """With several models the device's memory decides."""

    async def told(loop: VirtualLoop) -> None:
        daemon = await VirtualDaemon(loop, workers=1).start()
        daemon.fleet.supervisor.let_to(Owner())
        await asyncio.sleep(REST.sleep_after_s + 10 * REST.stop_after_s)
        assert daemon.fleet.places[W0].state is WorkerState.ASLEEP
        assert daemon.idle.outlook(W0) == ""
        await daemon.close()

    run_virtually(told)
