"""The Landlord's shell: feeds it the events of one daemon's models, and carries out its commands.

Has tenants only where several models share devices.  Decides nothing: `melld.landlord` does.

    schedulers, workers, calls ──event──► Landlord ──commands──► schedulers (what they may hold), fleets (granules),
                                                                 supervisors (processes)
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from melld.control.status import DeviceStatus
from melld.daemon.model import NotUnloaded, ServedModel, Unloaded
from melld.daemon.town.tenant import KEPT_OUT_S, Tenant, device_status
from melld.engine.fleet.arena import AnyArena
from melld.engine.fleet.life import State
from melld.engine.fleet.owner import NothingFits, Offers, Owner, WorkerStartFailed
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.ids import NO_EVENT, DeviceName, EventId, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.division import Division
from melld.landlord.events import LandlordCommand, LandlordEvent
from melld.landlord.instance import ON_DEVICE, InstanceState
from melld.landlord.landlord import Landlord
from melld.scheduler import events

log = logging.getLogger("melld.landlord")
TICK_S = 0.25


class LandlordShell(Owner):
    """The Landlord of one daemon, and the workers of its models, which it owns."""

    def __init__(self, landlord: Landlord, clock: Callable[[], float]) -> None:
        super().__init__()
        self.landlord = landlord
        self.arenas: dict[DeviceName, AnyArena] = {}
        self.division = Division()
        self._on_loaded: Callable[[ServedModel], None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self.tenants: dict[ModelName, Tenant] = {}
        self._clock = clock
        self._heard_s, self._told = 0.0, NO_EVENT
        self._by_worker: dict[WorkerId, Tenant] = {}
        self._offers: dict[WorkerId, e.OfferCapacity] = {}
        self._last_offers: dict[WorkerId, e.OfferCapacity] = {}
        self._is_telling = False
        self._leaving: dict[WorkerId, asyncio.Future[None]] = {}
        self._scrubbed: set[WorkerId] = set()

    def take_over(
        self, declared: Iterable[LandlordEvent], tenants: Iterable[Tenant], arenas: Mapping[DeviceName, AnyArena]
    ) -> None:
        """Take ownership of these models' workers; `declared` lists what exists."""
        self.arenas |= arenas
        for tenant in tenants:
            self.tenants[tenant.key] = tenant
            self._by_worker |= dict.fromkeys(tenant.fleet.places, tenant)
            tenant.driver.add_tap(partial(self._heard, tenant))
        for event in declared:
            self.hear(event)

    def _forget(self, tenant: Tenant) -> None:
        del self.tenants[tenant.key]
        for worker in tenant.fleet.places:
            del self._by_worker[worker]
            for offers in (self._offers, self._last_offers):
                offers.pop(worker, None)

    async def start(self, on_ready: Callable[[Place], None]) -> None:
        """Load one instance of each model while there is room, pinned models first; return when each is there.

        Raises:
            WorkerStartFailed, NothingFits: none could be started.
        """
        self.hear(e.ModelsMeasured(self._clock(), {}))  # it looks where models could be loaded
        for tenant in sorted(self.tenants.values(), key=lambda one: not one.model.parts.config.model.pinned):
            self.want(tenant.model)
        if not self.begun:
            raise NothingFits
        try:
            await self.wait(on_ready)
        except WorkerStartFailed as failed:
            raise self._by_worker[WorkerId(failed.worker)].model.named(failed) from failed

    async def run(self) -> None:
        """Report what the models do, several times a second, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for tenant in list(self.tenants.values()):
                self._tell_needs(tenant)
                for event in tenant.departure(self.landlord.instances, self._clock()):
                    self.hear(event)
                if tenant.key not in self.landlord.models:
                    self._forget(tenant)
                    continue
                if tenant.model.waiting and not tenant.model.is_warm:
                    self.want(tenant.model)
                tenant.refuse_what_never_fits(self.landlord.models[tenant.key])
            loads = {key: tenant.take_load(self.landlord.instances) for key, tenant in self.tenants.items()}
            self.hear(e.ModelsMeasured(self._clock(), loads))

    # -- what happens ------------------------------------------------------------------------------------------------

    def hear(self, event: LandlordEvent) -> None:
        """Let the Landlord decide, and carry out its commands, whose effects may overtake further events."""
        self._heard_s = max(event.at_s, self._heard_s)
        self._told = EventId(self._told + 1)
        log.debug("%s", event := msgspec.structs.replace(event, at_s=self._heard_s, id=self._told))
        with contextlib.ExitStack() as each:  # runs them in their order, and each though one before it has failed
            each.callback(self.tell_offers)
            for command in reversed(self.landlord.handle(event)):
                each.callback(self._carry_out, command)

    def _heard(self, tenant: Tenant, event: events.AnyEvent, *_: object) -> None:
        """Note an event that the model's scheduler has handled, and its current counts."""
        tenant.heard(event)
        self._tell_needs(tenant)

    def _tell_needs(self, tenant: Tenant) -> None:
        for need in tenant.take_needs(self._clock()):
            self.hear(need)

    def tell_offers(self) -> None:
        """Send each idle scheduler its offer; a busy one gets the latest offer afterwards.

        One offer after the other: a scheduler decides on the first part of one, which changes others, and comes back
        here; the rest of the first would then undo what is newer.
        """
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while rested := [worker for worker in self._offers if not self._by_worker[worker].driver.is_busy]:
                self._by_worker[rested[0]].tell(self._offers.pop(rested[0]))
        finally:
            self._is_telling = False

    def want(self, model: ServedModel) -> None:
        """Load a model that no worker has, if there is room; otherwise count its waiting calls."""
        if (tenant := self.tenants.get(model.key)) is None:
            return  # it is alone
        self._on_loaded(model)
        for _ in (workers := tenant.fleet.places):  # where an operator keeps a worker out, another is offered
            room = [one for one in map(self._last_offers.get, workers) if one and one.capacity_bytes]
            if room and not any(self.landlord.instances[worker].state in ON_DEVICE for worker in workers):
                self.hear(e.ModelWanted(self._clock(), min(room, key=lambda offer: offer.wake_s).worker))

    # -- what happens to workers: the supervisor's and the fleet's owner ---------------------------------------------

    def wanted(self, worker: WorkerId) -> None:
        """See `Owner`."""
        if worker in self._last_offers:  # its scheduler was not told of it while an operator kept it out of service
            self._offers[worker] = self._last_offers[worker]
        self.hear(e.WorkerActivated(self._clock(), worker))

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady, _: Offers | None = None) -> None:
        """See `Owner`."""
        tenant, instance = self._by_worker[worker], self.landlord.instances[worker]
        tenant.model.failure = ""
        self.hear(e.ModelLoaded(self._clock(), worker, tenant.measured(ready), ready.geometry.block_bytes))
        tenant.note_ready(ready, instance.most_bytes)
        self._offers |= {name: self._last_offers[name] for name in tenant.fleet.places if name in self._last_offers}
        self.tell_offers()
        self._on_loaded(tenant.model)

    def serve(self, on_loaded: Callable[[ServedModel], None]) -> None:
        """Call `on_loaded` for each model that a worker has loaded, or that is called, from now on."""
        self._on_loaded = on_loaded
        for tenant in self.tenants.values():
            on_loaded(tenant.model)

    def worker_ended(self, worker: WorkerId, ended: WorkerEnded) -> None:
        """See `Owner`."""
        if self.landlord.instances[worker].state is not InstanceState.LOADING:
            return  # `worker_gone` follows, or came before
        if ended.expected:
            self.hear(e.ModelGone(self._clock(), worker))
            return
        place = (tenant := self._by_worker[worker]).fleet.places[worker]
        failure = tenant.model.named(WorkerStartFailed(worker, place.slot.device, ended.reason))
        self.hear(e.LoadFailed(self._clock(), worker, place.life.back_off_s))
        if not ended.from_outside and not tenant.model.is_warm:
            tenant.model.failed(str(failure), place.life.back_off_s)

    def worker_gone(self, worker: WorkerId) -> None:
        """See `Owner`: its KV memory can be freed."""
        is_loading = self.landlord.instances[worker].state is InstanceState.LOADING  # and has no granules
        if not is_loading and worker not in self._scrubbed:  # else it has died as it began to doze
            self._scrubbed.add(worker)
            task = asyncio.get_running_loop().create_task(self._scrub(worker))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def returned(self, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        """See `Owner`."""
        self._by_worker[worker].moved_blocks += returned.moved_blocks
        self.hear(e.KvReturned(self._clock(), worker, returned.granules))

    async def _scrub(self, worker: WorkerId) -> None:
        """Free the memory of a worker that has ended or dozes.  What it is granted meanwhile does not reach it."""
        place, house = (tenant := self._by_worker[worker]).fleet.places[worker], self.landlord.instances[worker].house
        arena, granules = self.arenas.get(house.name), house.ledger.granules(worker)
        if arena is not None and tenant.lends and granules:
            await arena.scrub(granules)
        self._scrubbed.discard(worker)
        if place.life.state is State.DOZING:
            self.hear(e.ModelDozed(self._clock(), worker, place.dozing_bytes))
            return
        self.hear(e.ModelGone(self._clock(), worker))
        if (leaving := self._leaving.pop(worker, None)) is not None and not leaving.cancelled():
            leaving.set_result(None)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("dividing memory between models failed", exc_info=error)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: LandlordCommand) -> None:
        tenant, worker = self._by_worker[command.worker], command.worker
        log.debug("%s", command)
        match command:
            case e.OfferCapacity():
                last = self._last_offers.get(worker)
                if last is None or last.cause <= command.cause:  # else a command before it has led to a newer one
                    self._offers[worker] = self._last_offers[worker] = command
            case e.GrantKv() if tenant.lends:  # else its KV memory is its own
                tenant.fleet.lending.grant(worker, command.granules, command.cause)
            case e.TakeKv():
                tenant.takes += 1
                tenant.fleet.lending.take(worker, command.granules, command.deadline_s, command.cause)
            case e.LoadModel():
                self._load(tenant, worker)
            case e.UnloadModel():
                tenant.fleet.places[worker].unloaded_because = command.why
                log.info("%s: unloading %s (%s)", worker, tenant.name, command.why)
                if command.why is e.Why.TOO_LARGE and (one := self.landlord.instances[worker]):
                    self.ended(worker, WorkerStartFailed(worker, one.house.name, one.why_too_large))
                    tenant.refuse_what_never_fits(self.landlord.models[tenant.key])
                tenant.fleet.stop_worker(worker)  # one that has died is on its way to `worker_gone` already
            case e.DozeModel():
                tenant.fleet.places[worker].unloaded_because = command.why
                log.info("%s: %s is dozing (%s)", worker, tenant.name, command.why)
                tenant.fleet.supervisor.doze(worker)
            case e.StopDozing():
                tenant.fleet.supervisor.stop_dozing(worker)
            case e.DrainInstance() | e.ReopenInstance():
                tenant.drain(worker, self._clock(), is_reopened=isinstance(command, e.ReopenInstance))

    def _load(self, tenant: Tenant, worker: WorkerId) -> None:
        tenant.loads += 1
        dozes = tenant.fleet.places[worker].life.state is State.DOZING
        log.info("%s: %s %s", worker, "waking" if dozes else "loading", tenant.name)
        if not tenant.fleet.supervisor.load(worker) and self.landlord.instances[worker].state is InstanceState.LOADING:
            why = tenant.fleet.places[worker].life.obstacle or "an operator took it out of service"
            self.ended(worker, WorkerStartFailed(worker, "its device", why))
            self.hear(e.LoadFailed(self._clock(), worker, KEPT_OUT_S))

    def load_if_room(self, model: ServedModel, *, on_trial: bool = False) -> None:
        """Load an added model, if no other must be unloaded for it; `on_trial`: nor one that dozes be ended."""
        self.hear(e.ModelsMeasured(self._clock(), {}))  # it looks where the model could be loaded
        if (choice := self.landlord.models[model.key].choice) and not (choice.victims or (on_trial and choice.dozers)):
            self.want(model)

    # -- for operators -----------------------------------------------------------------------------------------------

    async def unload(self, model: ServedModel, now: bool) -> None:
        """Unload the model once its requests have ended, or `now`, with an error for each of them.

        Raises:
            NotUnloaded: it is pinned, or is being loaded.
        """
        if model.parts.config.model.pinned:
            raise NotUnloaded(f"{model.name} is pinned: it stays loaded")
        tenant = self.tenants[model.key]
        instances = [self.landlord.instances[worker] for worker in tenant.fleet.places]
        if any(one.state in (InstanceState.LOADING, InstanceState.CLEARING) for one in instances):
            raise NotUnloaded(f"{model.name} is still loading: try again once it is loaded")
        there = [one.id for one in instances if one.state in ON_DEVICE | {InstanceState.DOZING}]
        gone = [self._leaving.setdefault(worker, asyncio.get_running_loop().create_future()) for worker in there]
        for worker in there:
            self.hear(e.UnloadAsked(self._clock(), worker))
        for request in list(tenant.fleet.live) if now else ():
            tenant.fleet.requests.end(request, Unloaded(model.name))
        await asyncio.gather(*gone)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return how each device's memory is divided."""
        houses = self.landlord.houses.values()
        return tuple(device_status(house, self._by_worker, self.arenas.get(house.name)) for house in houses)
