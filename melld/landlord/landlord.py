"""The Landlord: which models are on which devices, and how much KV memory each may use there.

Pure: no I/O, no clock (`event.at_s` is the time), no randomness; the same events give the same commands.  It stands
above one unchanged scheduler for each model.  A scheduler sees every device as a worker of its model; the Landlord
tells it what that worker may hold, loaded or not, and carries out its wish for more.

    schedulers ──WorkerActivated, KvNeeded──► Landlord ──OfferCapacity, DrainInstance, ReopenInstance──► schedulers
    workers    ──KvReturned, ModelLoaded, ...──► Landlord ──GrantKv, TakeKv, LoadModel, DozeModel, ...──► workers
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from melld.engine.fleet.life import Event, Intent
from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events
from melld.landlord.events import LandlordCommand, LandlordEvent, Why
from melld.landlord.granules import GRANULE_BLOCKS, GranuleLedger
from melld.landlord.instance import ABSENT, PRESENT, UNLOADED, DeclaredModel, House, Instance
from melld.landlord.instance import InstanceState as S
from melld.landlord.lending import Lender
from melld.landlord.placement import LandlordSettings, Placement

FEWER_EVERY_S = 10.0
"""Period of trying to empty a device."""
CHOOSE_EVERY_S = 1.0
"""Period of choosing where each model would be loaded; also chosen whenever an instance comes or goes."""


class Landlord:
    """All devices and models of one daemon."""

    def __init__(self, settings: LandlordSettings | None = None) -> None:
        self.settings = settings or LandlordSettings()
        self.models: dict[ModelName, DeclaredModel] = {}
        self.houses: dict[DeviceName, House] = {}
        self.instances: dict[WorkerId, Instance] = {}
        self.lender = Lender(self._tell)
        self.placement = Placement(self.settings, self.houses, self.instances, self._tell)
        self._commands: list[LandlordCommand] = []
        self._now_s = 0.0
        self._measured_s: float | None = None
        self._hurried: set[WorkerId] = set()
        self._looked_s = 0.0
        self._chosen_s = -CHOOSE_EVERY_S
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.DeviceDeclared: self._device_declared,
            events.ModelDeclared: self._model_declared,
            events.InstanceDeclared: self._instance_declared,
            events.ModelRemoved: self._model_removed,
            events.ModelWanted: self._wanted,
            events.WorkerActivated: self._activated,
            events.UnloadAsked: self._unload_asked,
            events.KvNeeded: self._needed,
            events.KvReturned: self._returned,
            events.ModelLoaded: self._loaded,
            events.LoadFailed: self._load_failed,
            events.ModelDozed: self._dozed,
            events.ModelGone: self._gone,
            events.ModelsMeasured: self._measured,
        }

    def handle(self, event: LandlordEvent) -> list[LandlordCommand]:
        """Handle one event; return the commands, to be applied in this order.

        Raises:
            IllegalTransition: the event contradicts what is known of the instance.
            KeyError: it names a device, model or instance that was not declared.
            ValueError: its time is before the last one's.
        """
        if event.at_s < self._now_s:
            raise ValueError(f"time runs backwards: {event.at_s} after {self._now_s}")
        self._now_s = event.at_s
        self._handlers[type(event)](event)
        commands, self._commands = self._commands, []
        return [msgspec.structs.replace(command, cause=event.id) for command in commands] if event.id else commands

    def _tell(self, command: LandlordCommand) -> None:
        self._commands.append(command)

    # ---- what there is

    def _device_declared(self, event: events.DeviceDeclared) -> None:
        house = House(event.device, GranuleLedger(event.memory_bytes, event.granule_bytes))
        self.houses[event.device] = house

    def _model_declared(self, event: events.ModelDeclared) -> None:
        if (known := self.models.get(event.model)) is not None:
            known.declared = event
        else:
            self.models[event.model] = DeclaredModel(event)
            self._chosen_s = -math.inf  # the next epoch finds a place for it

    def _instance_declared(self, event: events.InstanceDeclared) -> None:
        model, house = self.models[event.model], self.houses[event.device]
        instance = Instance(event.worker, model, house, self._now_s)
        self.instances[event.worker] = instance
        house.instances.append(instance)
        model.instances.append(instance)

    def _model_removed(self, event: events.ModelRemoved) -> None:
        leavers = self.models[event.model].instances
        assert all(one.state in UNLOADED for one in leavers), event
        del self.models[event.model]
        for one in leavers:
            del self.instances[one.id]
            one.house.instances.remove(one)
        self._settle_all()

    # ---- what schedulers want

    def _wanted(self, event: events.ModelWanted) -> None:
        self.placement.want(self.instances[event.worker], self._now_s)
        self._settle_all()

    def _activated(self, event: events.WorkerActivated) -> None:
        """Load another instance of a served model before it has requests, if there is room.

        A scheduler wants so many in service for what may come.  That is no reason to bring back a model that has just
        left, or to let another leave.
        """
        instance = self.instances[event.worker]
        choice = instance.model.choice
        if choice is not None and choice.instance is instance and not choice.victims and instance.model.is_served:
            self._wanted(events.ModelWanted(event.at_s, event.worker))

    def _unload_asked(self, event: events.UnloadAsked) -> None:
        instance = self.instances[event.worker]
        if instance.state is S.READY:
            self.placement.drain(instance, Why.OPERATOR, self._now_s)
        elif instance.state is S.DOZING:
            self.placement.leave(instance, Why.OPERATOR, self._now_s)
        elif instance.drained_for is not None:
            instance.drained_for = Why.OPERATOR
        self._settle_all()

    def _needed(self, event: events.KvNeeded) -> None:
        instance = self.instances[event.worker]
        instance.note_use(event.used_bytes, event.ahead_bytes, event.requests, event.at_s)
        if event.requests and instance.state in ABSENT:
            self._wanted(events.ModelWanted(event.at_s, event.worker))
        elif not event.requests and instance.state is S.DRAINING:
            self.placement.leave(instance, instance.drained_for or Why.IDLE, self._now_s)
        self._settle(instance.house)

    # ---- what workers report

    def _returned(self, event: events.KvReturned) -> None:
        instance = self.instances[event.worker]
        self.lender.returned(instance, event.granules, event.at_s)
        self._settle(instance.house)

    def _loaded(self, event: events.ModelLoaded) -> None:
        instance = self.instances[event.worker]
        was_let = instance.state is S.LOADING
        instance.took_s = event.at_s - instance.since_s if was_let else 0.0
        instance.become(Intent.IN_SERVICE, event.at_s, Event.WAKE, Event.IS_READY)
        instance.idle_since_s = event.at_s
        model = instance.model
        model.resident_bytes = event.resident_bytes or model.resident_bytes
        if not was_let:  # it was alone before, and may have all that there is
            ledger = instance.house.ledger
            model.resident_bytes = min(model.resident_bytes, ledger.memory_bytes - 2 * ledger.granule_bytes)
        if event.block_bytes * GRANULE_BLOCKS <= instance.house.ledger.granule_bytes:  # else its KV memory is its own
            model.block_bytes = event.block_bytes or model.block_bytes
        instance.house.ledger.reside(instance.id, model.resident_bytes)
        if instance.house.promised < len(instance.house.present):
            self.placement.leave(instance, Why.TOO_LARGE, self._now_s)
        self._settle_all()

    def _load_failed(self, event: events.LoadFailed) -> None:
        instance = self.instances[event.worker]
        instance.become(Intent.OUT, event.at_s, Event.DIED)
        instance.retry_at_s = event.at_s + event.retry_s
        self._left(instance, 0)

    def _dozed(self, event: events.ModelDozed) -> None:
        instance = self.instances[event.worker]
        if instance.state is S.STOPPED:  # it was loaded once, at the start
            instance.become(Intent.IN_SERVICE, event.at_s, Event.WAKE, Event.IS_READY)
            instance.become(Intent.OUT, event.at_s, Event.DOZE)
        instance.become(Intent.OUT, event.at_s, Event.HAS_DOZED)
        if instance.id not in self._hurried:  # else its weights may not be gone
            instance.model.dozing_bytes = event.resident_bytes
        self._hurried.discard(instance.id)
        if instance.drained_for is Why.OPERATOR:  # asked for since
            self.placement.leave(instance, Why.OPERATOR, self._now_s)
        self._left(instance, event.resident_bytes)

    def _gone(self, event: events.ModelGone) -> None:
        instance = self.instances[event.worker]
        instance.gone(event.at_s)
        self._hurried.discard(instance.id)
        self._left(instance, 0)

    def _left(self, instance: Instance, resident_bytes: int) -> None:
        """Free the instance's memory; let its scheduler use it again."""
        instance.taking = 0
        ledger = instance.house.ledger
        ledger.give_back_all(instance.id)
        ledger.reside(instance.id, resident_bytes)
        if instance.drained_for is not None:
            instance.drained_for = None
            self._tell(events.ReopenInstance(instance.id, Why.BACK))
        self._settle_all()

    # ---- the epoch

    def _measured(self, event: events.ModelsMeasured) -> None:
        passed_s = event.at_s - (event.at_s if self._measured_s is None else self._measured_s)
        self._measured_s = event.at_s
        for model in self.models.values():
            model.demand.observe(event.loads.get(model.name), passed_s)
        for model in self.models.values():
            self._serve_waiting(model, event.loads.get(model.name))
        for instance in self.instances.values():
            self.placement.pass_time(instance, self._now_s)
        if event.at_s - self._looked_s >= FEWER_EVERY_S:
            self._looked_s = event.at_s
            is_short = any(model.waiting_since_s is not None for model in self.models.values())
            self.placement.use_fewer(self._now_s, is_short)
        if event.at_s - self._chosen_s >= CHOOSE_EVERY_S or any(model.first_bytes for model in self.models.values()):
            self._settle_all()
        else:
            for house in self.houses.values():
                self._settle(house)

    def _serve_waiting(self, model: DeclaredModel, load: events.ModelLoad | None) -> None:
        """Track how long the model's requests have waited; after `swap_after_s` unload another model for it."""
        waiting = load is not None and load.waiting > 0
        model.first_bytes = load.first_bytes if load is not None else 0
        if not waiting:
            model.waiting_since_s = None
        elif model.waiting_since_s is None:
            model.waiting_since_s = self._now_s
        coming = any(one.state in PRESENT for one in model.instances)
        for one in model.instances if waiting else ():
            if one.state is S.DRAINING and one.drained_for is Why.FEWER:
                self.placement.keep(one, self._now_s)
                coming = True
        for one in model.instances if waiting and not coming else ():
            if one.state is S.LEAVING and one.drained_for is not Why.OPERATOR:
                self._hurried.add(one.id)
                self._tell(events.StopDozing(one.id, Why.WANTED))
        in_vain = waiting and self._now_s - (model.waiting_since_s or 0.0) >= self.settings.swap_after_s
        choice = None
        if not coming and (model.declared.pinned or in_vain):  # its scheduler may know of nowhere: workers are drained
            choice = self.placement.choose(model, self._now_s)
        if choice is not None:
            model.choice = choice
            self.placement.want(choice.instance, self._now_s)
        elif in_vain and coming:
            self.placement.make_room(model, self._now_s)
        elif in_vain:
            self.placement.swap(model, self._now_s)

    # ---- afterwards

    def _settle_all(self) -> None:
        """Recompute where each model would be loaded, then settle every device."""
        self._chosen_s = self._now_s
        for model in self.models.values():
            model.choice = self.placement.choose(model, self._now_s)
        for house in self.houses.values():
            self._settle(house)

    def _settle(self, house: House) -> None:
        """Move granules, and tell schedulers what the device's instances now offer."""
        now_s = self._now_s
        self.lender.settle(house, now_s)
        if house.is_short(now_s):
            self.placement.end_a_dozing(house, now_s)
        claims = {one.id: one.claim(now_s) for one in house.instances}
        spare = house.promised - sum(claims.values())
        for instance in house.instances:
            if instance.state in PRESENT:
                granules = max(spare + claims[instance.id], 0)
                if not self.settings.lends:
                    granules = min(granules, max(house.promised, 0) // len(house.present))
                self.lender.offer(instance, granules)
            elif instance.state is not S.DRAINING:
                self.lender.offer(instance, max(self._offered(instance, spare, claims), 0))

    def _offered(self, instance: Instance, spare: int, claims: dict[WorkerId, int]) -> int:
        """Return the granules that the instance would have if it were loaded; only the chosen one offers any."""
        choice = instance.model.choice
        if choice is None or choice.instance is not instance or instance.state not in ABSENT:
            return 0
        if any(victim.requests for victim in choice.victims):
            return 0
        freed = sum(victim.weights + claims[victim.id] for victim in choice.victims if victim.state in PRESENT)
        return spare + claims[instance.id] + freed - instance.weights
