"""Several models on shared devices, as in a daemon, over workers without a model.

The Landlord and its shell, fleets, supervisors, drivers, schedulers and drains are the real ones.  A granule holds a
block.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from melld.config import Config, ModelConfig
from melld.daemon.model import ModelNotLoaded, ModelParts, ServedModel, Unloaded
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.town.tenant import Tenant
from melld.driver.idle import IdleSettings, IdleWorkers
from melld.driver.loans import Loans
from melld.engine.fleet.request import RequestKilledWorkers
from melld.engine.host.ports import Ear
from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from melld.errors import MelldError
from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.instance import ON_DEVICE, InstanceState
from melld.landlord.landlord import Landlord
from melld.landlord.placement import LandlordSettings
from tests.engine.fleet.virtual_daemon import SOON_STEADY, VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, end_all
from tests.engine.fleet.virtual_worker import BLOCK_BYTES, VirtualChild, VirtualHost, VirtualWorker
from tests.kvstore.laws import check_ledger
from tests.landlord.law import check_landlord
from tests.scheduler.law import check_cluster

WEIGHTS = 4
BORROWED = 40
"""The blocks of a worker that it may be granted, or that it has by itself."""
ENDINGS = (RequestKilledWorkers, ModelNotLoaded, Unloaded)


@dataclass
class Borrower(VirtualWorker):
    """A worker whose KV memory is lent, and which dozes once it is empty."""

    granules: set[int] = field(default_factory=set)
    is_to_doze: bool = False

    def obey(self, willing: bool = True) -> None:
        message = self.inbox[0][0] if self.inbox else None
        mine = wire.GrantGranules | wire.TakeGranules | wire.Doze | wire.StopDozing | wire.Wake
        if not isinstance(message, mine) or not self.ready or self.hung:
            super().obey(willing)
        else:
            self.inbox.popleft()
            self._obey(message, willing)
        if self.is_to_doze and self.ended is None and not self.used_blocks:
            self.is_to_doze = False
            self.granules.clear()
            self.say(wire.Dozed(resident_bytes=BLOCK_BYTES))

    def _obey(self, message: Any, willing: bool) -> None:
        match message:
            case wire.GrantGranules():
                assert message.cause, "nobody can tell what it was granted for"
                self.granules |= set(message.granules)
            case wire.TakeGranules():
                spare = max(len(self.granules) - self.used_blocks, 0) if willing else 0
                given = tuple(sorted(self.granules)[len(self.granules) - min(message.granules, spare) :])
                self.granules -= set(given)
                self.say(wire.GranulesReturned(take=message.take, granules=given))
            case wire.Doze() if willing:
                self.is_to_doze = True
            case wire.Doze():
                self.say(wire.Dozed(failure="will not"))
            case wire.Wake():
                self.ready, self.reports = False, 0  # until its weights are read


class BorrowersHost(VirtualHost):
    """Makes borrowing workers."""

    def spawn(self, spec: WorkerSpec, ear: Ear) -> VirtualChild:
        asyncio.get_running_loop().call_soon(ear.forked, 0)
        worker = self.workers[spec.worker] = Borrower(spec.worker, ear, total_blocks=BORROWED)
        return VirtualChild(worker)


class VirtualArena:
    """KV memory of a device; scrubbing takes a while, during which the memory must not be used."""

    resident_bytes = 0

    def __init__(self, borrowers: Callable[[], list[Borrower]]) -> None:
        self._borrowers = borrowers

    async def scrub(self, granules: Collection[int]) -> None:
        self.check(granules)
        await asyncio.sleep(0.05)
        self.check(granules)

    def check(self, granules: Collection[int] = ()) -> None:
        """Check that no granule is in two places."""
        users = [set(granules), *(one.granules for one in self._borrowers())]
        assert len(set().union(*users)) == sum(map(len, users)), f"granules are used twice: {users}"


class Town:
    """Models `a`, `b`, ... on devices of so many granules; the first is pinned if `pinned`.  `start` first."""

    def __init__(
        self, loop: VirtualLoop, models: int = 2, devices: int = 2, granules: int = 14,
        keep_alive_s: float = 300.0, policy: str = "mell-slo", pinned: bool = False, dozes: bool = False,
        alone: bool = False,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.shell = LandlordShell(Landlord(LandlordSettings()), loop.time)
        self.shell._done = self._done  # type: ignore[method-assign]
        self.loans = Loans(loop.time)
        self.names = [ModelName("abcdef"[number]) for number in range(models)]
        self.daemons: dict[ModelName, VirtualDaemon] = {}
        self.models: dict[ModelName, ServedModel] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.failures: list[BaseException] = []
        self.refused: list[MelldError] = []
        self.reading_s = 0.0
        """What the front end takes to make a request of a call."""
        houses = [DeviceName(f"d{number}") for number in range(devices)]
        declared: list[e.LandlordEvent] = [
            e.DeviceDeclared(loop.time(), house, granules * BLOCK_BYTES, BLOCK_BYTES) for house in houses
        ]
        for name in self.names:
            daemon = self.daemons[name] = VirtualDaemon(
                loop,
                devices,
                policy,
                SOON_STEADY,
                owner=self.shell,
                name=name,
                host=BorrowersHost,
                is_alone=alone and name == self.names[0],
                loans=self.loans,
            )
            daemon.idle = IdleWorkers(daemon.fleet, daemon.cluster, IdleSettings(2.0, math.inf), loop.time)
            is_pinned = pinned and name == self.names[0]
            parts: Any = dict.fromkeys(("history", "why"))
            parts |= {"fleet": daemon.fleet, "driver": daemon.driver, "cluster": daemon.cluster, "idle": daemon.idle}
            config = Config(model=ModelConfig(path="", name=name, pinned=is_pinned))
            parts |= {"config": config, "stories": daemon.stories}
            self.models[name] = ServedModel(ModelParts(**parts), self.shell.want)
            is_alone = alone and name == self.names[0]
            facts = (WEIGHTS + BORROWED * is_alone) * BLOCK_BYTES, BLOCK_BYTES, 1.0
            kept: dict[str, Any] = {"keep_alive_s": keep_alive_s, "stop_after_s": 15.0, "wake_s": 0.1}
            declared.append(e.ModelDeclared(loop.time(), name, *facts, pinned=is_pinned, dozes=dozes, **kept))
            declared += [
                e.InstanceDeclared(loop.time(), worker, name, house)
                for worker, house in zip(daemon.names, houses, strict=True)
            ]
        lending = [not (alone and name == self.names[0]) for name in self.names]
        tenants = [
            Tenant(one, BLOCK_BYTES, lends=lends) for one, lends in zip(self.models.values(), lending, strict=True)
        ]
        self.arenas = {house: VirtualArena(partial(self._borrowers, number)) for number, house in enumerate(houses)}
        self.take_over = partial(self.shell.take_over, declared, tenants, self.arenas)  # type: ignore[arg-type]
        if not alone:
            self.take_over()

    def _borrowers(self, device: int) -> list[Borrower]:
        """Return the processes on this device."""
        names = [daemon.names[device] for daemon in self.daemons.values()]
        return [one for one in self.workers if one.name in names and isinstance(one, Borrower) and one.ended is None]

    def _done(self, task: asyncio.Task[None]) -> None:
        self.shell._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    def spawn(self, work: Any) -> None:
        """Run this beside the history, swallowing operator refusals."""

        async def quietly() -> None:
            try:
                await work
            except MelldError as error:
                self.refused.append(error)

        task = asyncio.get_running_loop().create_task(quietly())
        self.tasks.add(task)

    async def adopt(self) -> "Town":
        """Give the first model, which was alone, its neighbours."""
        first = self.daemons[self.names[0]]
        await first.start()
        self.take_over()
        first.fleet.supervisor.let_to(self.shell)
        for worker, ready in first.fleet.ready.items():
            self.shell.worker_ready(worker, ready)
        return await self._serve(self.names[1:])

    async def start(self) -> "Town":
        """Load what fits and run the daemon's loops."""
        self.spawn(self.shell.start(lambda _place: None))
        await self.rest()
        return await self._serve(self.names)

    async def _serve(self, names: Collection[ModelName]) -> "Town":
        async def open_model(model: ServedModel) -> None:
            await asyncio.sleep(0)
            model.serving = SimpleNamespace()
            model.loaded()

        def loaded(model: ServedModel) -> None:
            if model.is_warm and model.serving is None:
                self.spawn(open_model(model))
            elif model.is_warm:
                model.loaded()

        self.shell.serve(loaded)
        self.spawn(self.shell.run())
        for daemon in [self.daemons[name] for name in names]:
            for work in (daemon.fleet.supervisor.watch(), daemon.driver.run(), daemon.idle.run()):
                self.spawn(work)
        await self.rest()
        return self

    async def close(self) -> None:
        await end_all(self.tasks)

    # -- clients and workers

    def call(self, model: ModelName, blocks: int, length: int) -> None:
        """Make a client's call, which waits for a model that was never loaded."""

        async def asked() -> None:
            with self.models[model].called():
                if self.models[model].serving is None:
                    await self.models[model].until_loaded()
                await asyncio.sleep(self.reading_s)
                self.daemons[model].admit(blocks, length)

        self.spawn(asked())

    @property
    def workers(self) -> list[VirtualWorker]:
        return [one for daemon in self.daemons.values() for one in daemon.workers()]

    def states(self) -> dict[WorkerId, InstanceState]:
        return {name: one.state for name, one in self.shell.landlord.instances.items()}

    async def settle(self) -> None:
        for daemon in self.daemons.values():
            await daemon.settle()

    async def rest(self) -> None:
        """Run until all loads have ended and every message is processed."""
        for _ in range(3):
            await self.settle()
            for worker in self.workers:
                worker.become_ready()
            for daemon in self.daemons.values():
                await daemon.flush()

    def check(self) -> None:
        """Check that all records of one fact agree."""
        assert not self.failures, self.failures
        check_landlord(self.shell.landlord)
        for arena in self.arenas.values():
            arena.check()
        found: list[str] = []
        for daemon in self.daemons.values():
            check_cluster(daemon.cluster)
            check_ledger(daemon.fleet.ledger)
            found += [*daemon._of_moves(), *daemon._of_notes(), *daemon._of_stories(), *daemon.auditor.faults]
        found += self._of_instances()
        assert not found, found

    def _of_instances(self) -> list[str]:
        found = []
        for daemon in self.daemons.values():
            for name, place in daemon.fleet.places.items():
                state = self.shell.landlord.instances[name].state
                if place.is_ready and state not in (InstanceState.READY, InstanceState.DRAINING, InstanceState.LEAVING):
                    found.append(f"{name} is {place.state}, the Landlord believes {state}")
                if state is InstanceState.LOADING and place.state.value not in ("starting", "waking"):
                    found.append(f"{name} is {place.state}, the Landlord waits for its load")
                told, offered = self.shell._last_offers.get(name), self.shell.landlord.instances[name].offered
                if told is not None and (told.capacity_bytes, told.wake_s) != offered:
                    found.append(f"{name} is offered {offered}, its scheduler hears {told}")
                if place.process is not None and state not in ON_DEVICE | {InstanceState.DOZING}:
                    found.append(f"{name} has a process, the Landlord believes {state}")
        return found

    async def finish(self) -> None:
        """Stop injecting faults and let every request complete."""
        for _ in range(400):
            await self.rest()
            for worker in self.workers:
                worker.step()
            await self.rest()
            self.check()
            await asyncio.sleep(0.3)
            waiting = any(model.waiting for model in self.models.values())
            if not waiting and not any(daemon.fleet.live for daemon in self.daemons.values()):
                break
        await self.rest()
        found = [one for daemon in self.daemons.values() for one in self._unanswered(daemon)]
        found += [f"{name} waits for its load" for name, model in self.models.items() if model.waiting]
        found += [f"{name}: {tenant._sizes}" for name, tenant in self.shell.tenants.items() if tenant._sizes]
        assert not found, (found, self.states())

    @staticmethod
    def _unanswered(daemon: VirtualDaemon) -> Iterator[str]:
        for request, tokens in daemon.clients.items():
            answered = len(tokens) == daemon.lengths[request] and request in daemon.finished
            if not (answered or request in daemon.left or isinstance(daemon.errors.get(request), ENDINGS)):
                there = daemon.cluster.requests.get(request)
                where = "unknown" if there is None else there.state
                yield f"{request} has {len(tokens)} of {daemon.lengths[request]} tokens and is {where}: {daemon.errors}"
