"""Random histories of a virtual town: several models, their clients, workers and operators.

For hours: `MELLD_HISTORIES=1000000 pytest tests/daemon/test_town.py`.
"""

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

from melld.ids import ModelName, WorkerId
from tests.daemon.virtual_town import Town
from tests.engine.fleet.virtual_daemon import VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually


class History:
    """One town, and its events."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.told: list[str] = []
        self._places = [(daemon, name) for daemon in town.daemons.values() for name in daemon.names]
        self._acts = (
            *[self._call] * 6,
            *[self._obey] * 4,
            *[self._deliver] * 4,
            *[self._step] * 4,
            *[self._pass] * 4,
            *[self._wait] * 2,
            *[self._load] * 4,
            *[self._rest] * 6,
            *[self._kill] * 3,
            self._refuse,
            self._hang,
            self._fail_to_load,
            self._leave,
            self._drain,
            *[self._resume] * 2,
            self._unload,
            self._load_model,
        )

    async def play(self, choice: int) -> None:
        """Play one event; after an odd one nothing runs before the next."""
        act = self._acts[choice // 2 % len(self._acts)]
        argument = choice // 2 // len(self._acts)
        daemon, name = self._places[argument % len(self._places)]
        number = argument // len(self._places)
        self.told.append(f"{act.__name__[1:]} {name} {number}")
        found = act(daemon, name, number)
        if found is not None:
            await found
        if choice % 2 == 0:
            await self.town.settle()
            self.town.check()

    def _worker(self, daemon: VirtualDaemon, name: WorkerId) -> Any:
        (host,) = daemon.hosts.values()
        return host.workers.get(name)

    def _model(self, name: WorkerId) -> ModelName:
        return ModelName(name[0])

    def _call(self, _: VirtualDaemon, name: WorkerId, number: int) -> None:
        self.town.call(self._model(name), 1 + number % 3, 2 + number % 7)

    def _obey(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if worker := self._worker(daemon, name):
            worker.obey()

    def _refuse(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if worker := self._worker(daemon, name):
            worker.obey(willing=False)

    def _deliver(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if worker := self._worker(daemon, name):
            worker.deliver()

    def _step(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if (worker := self._worker(daemon, name)) is not None:
            while len(worker.outbox) > 8 and worker.ended is None:
                worker.deliver()
            worker.step()

    async def _pass(self, _: VirtualDaemon, __: WorkerId, number: int) -> None:
        await asyncio.sleep(0.05 * (1 + number % 8))

    async def _wait(self, _: VirtualDaemon, __: WorkerId, number: int) -> None:
        await asyncio.sleep((1.0, 3.0, 6.0, 11.0)[number % 4])

    def _load(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if worker := self._worker(daemon, name):
            worker.become_ready()

    async def _rest(self, _: VirtualDaemon, __: WorkerId, ___: int) -> None:
        await self.town.rest()

    def _kill(self, daemon: VirtualDaemon, name: WorkerId, number: int) -> None:
        if worker := self._worker(daemon, name):
            worker.die(-signal.SIGKILL, heard=number % 3)

    def _hang(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if worker := self._worker(daemon, name):
            worker.hung = worker.ready

    def _fail_to_load(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        if (worker := self._worker(daemon, name)) is not None and not worker.ready:
            worker.die(1)

    def _leave(self, daemon: VirtualDaemon, _: WorkerId, number: int) -> None:
        if requests := daemon.open:
            daemon.leave(requests[number % len(requests)])

    def _drain(self, daemon: VirtualDaemon, name: WorkerId, number: int) -> None:
        self.town.spawn(daemon.drains.drain(name, wait=False, deadline_s=(None, 0.2, 3.0)[number % 3]))

    def _resume(self, daemon: VirtualDaemon, name: WorkerId, _: int) -> None:
        self.town.spawn(daemon.drains.resume(name))

    def _unload(self, _: VirtualDaemon, name: WorkerId, number: int) -> None:
        self.town.spawn(self.town.shell.unload(self.town.models[self._model(name)], now=bool(number % 2)))

    def _load_model(self, _: VirtualDaemon, name: WorkerId, __: int) -> None:
        self.town.spawn(self.town.models[self._model(name)].until_loaded())

    async def end(self) -> None:
        for daemon, name in self._places:
            if worker := self._worker(daemon, name):
                worker.hung = False
            self.town.spawn(daemon.drains.resume(name))
        await self.town.finish()


CHOICES = 65536
POLICIES = ("mell-slo", "mell-plus", "best-fit")
KEPT_S = (300.0, 0.0, 5.0)
GRANULES, FEWEST_BESIDE_PINNED = (14, 11, 20), 14
"""Of a device; two models with the largest request of one of them fit into the second."""


def play(choices: Sequence[int]) -> None:
    """Play one history, from the first start to the last answer; the first number picks the town."""

    async def history(loop: VirtualLoop) -> None:
        rest, policy = divmod(choices[0], len(POLICIES))
        rest, kept = divmod(rest, len(KEPT_S))
        rest, size = divmod(rest, len(GRANULES))
        models, devices, is_pinned = 2 + rest % 2, 1 + rest // 2 % 2, rest // 4 % 4 == 0
        granules = max(GRANULES[size], FEWEST_BESIDE_PINNED) if is_pinned else GRANULES[size]
        dozes = rest // 16 % 2 == 1
        granules += 3 * dozes
        kind: dict[str, Any] = {"pinned": is_pinned, "dozes": dozes}
        town = await Town(loop, models, devices, granules, KEPT_S[kept], POLICIES[policy], **kind).start()
        told = History(town)
        try:
            for choice in choices[1:]:
                await told.play(choice)
            await told.end()
            await town.close()
        except Exception as error:
            error.add_note("\n".join(["after:", str(choices[0]), *told.told]))
            raise

    run_virtually(history)
