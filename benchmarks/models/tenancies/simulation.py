"""The loop of a simulation with several models: one daemon's scheduler for each, and the Landlord above them.

    arrivals ─► Scheduler of the model ─► places, moves, wakes ─┬─► SimulatedInstance (granules, steps)
                     ▲ capacity, drain                          └─ KvNeeded, WorkerActivated
                     └───────────── Landlord ◄───────────────────────┘
                                       └─► grants, takes, loads ─► (time passes) ─► KvReturned, ModelLoaded ...

Owns virtual time, in epochs; arrivals and answers keep their own times between.  Never decides.  A baseline takes the
Landlord's place: whatever handles its events.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from melld.ids import ModelName, RequestId, WorkerId
from melld.landlord import events as e
from melld.landlord.events import LandlordCommand, LandlordEvent, ModelLoad
from melld.landlord.granules import usable_bytes
from melld.scheduler import events
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.events import AnyEvent
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.catalogue import BLOCK_TOKENS

from .device import SimulatedDevice, SimulatedInstance, SimulatedRequest
from .measures import ModelsMeasures
from .setting import ModelArrival, Setting, instance_name

HORIZON_S = 1.0
"""How far ahead growth is estimated: an epoch, a take and a block's tokens."""


class Tenancy(Protocol):
    """The Landlord, or a baseline in its place."""

    def handle(self, event: LandlordEvent) -> list[LandlordCommand]:
        """Return what is to be done about the event."""


class ModelsSimulation:
    """A run.  Call `run` once."""

    def __init__(self, setting: Setting, arrivals: Sequence[ModelArrival], tenancy: Tenancy) -> None:
        self.setting = setting
        self.arrivals = arrivals
        self.tenancy = tenancy
        self.now_s = 0.0
        self.measures = ModelsMeasures(setting, arrivals[-1].at_s if arrivals else 0.0)
        self.schedulers: dict[ModelName, Scheduler] = {}
        self.instances: dict[WorkerId, SimulatedInstance] = {}
        self._devices: dict[WorkerId, SimulatedDevice] = {}
        self._served = {one.name: one for one in setting.models}
        self._requests: dict[RequestId, SimulatedRequest] = {}
        self._told: dict[WorkerId, tuple[int, int, int]] = {}
        self._offers: dict[WorkerId, e.OfferCapacity] = {}
        self._loads: dict[ModelName, dict[str, float]] = {}
        self._dozing: set[WorkerId] = set()
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def run(self) -> ModelsMeasures:
        """Simulate until every request has ended."""
        self._declare()
        arrived, epochs = 0, 0
        while arrived < len(self.arrivals) or self._requests:
            end_s = epochs * self.setting.epoch_s
            while True:
                timed_s = self._timed[0][0] if self._timed else float("inf")
                arrival_s = self.arrivals[arrived].at_s if arrived < len(self.arrivals) else float("inf")
                if min(timed_s, arrival_s) > end_s:
                    break
                self.now_s = max(self.now_s, min(timed_s, arrival_s))
                if timed_s <= arrival_s:
                    heapq.heappop(self._timed)[2]()
                else:
                    self._arrive(arrived)
                    arrived += 1
            self.now_s = end_s
            self._epoch()
            epochs += 1
            if self.now_s > (self.arrivals[-1].at_s if self.arrivals else 0.0) + self.measures.PATIENCE_S:
                break
        self.measures.end(self.now_s, self.arrivals)
        return self.measures

    # ---- what happens

    def _declare(self) -> None:
        devices = {name: SimulatedDevice() for name in self.setting.device_names()}
        granules: dict[str, e.DeviceDeclared] = {}
        for one in self._served.values():
            settings = ClusterSettings(horizon_s=HORIZON_S)
            self.schedulers[one.name] = Scheduler(MellPlus, SchedulerSettings(cluster=settings))
            self._loads[one.name] = {}
        for event in self.setting.declarations():
            self.tenancy.handle(event)
            if isinstance(event, e.DeviceDeclared):
                granules[event.device] = event
            elif isinstance(event, e.InstanceDeclared):
                self._add_instance(event, devices[event.device], granules[event.device])
        names = self.setting.device_names()
        for index, model in enumerate(self._served if self.setting.dozing else ()):
            worker = instance_name(model, names[index % len(names)])
            self._dozing.add(worker)
            self._handle(e.ModelDozed(0.0, worker))

    def _add_instance(self, event: e.InstanceDeclared, device: SimulatedDevice, declared: e.DeviceDeclared) -> None:
        served = self._served[event.model]
        block_bytes = BLOCK_TOKENS * served.model.bytes_per_token
        usable = usable_bytes(declared.granule_bytes, block_bytes)
        instance = SimulatedInstance(event.worker, event.model, self.setting.profile(served), block_bytes, usable)
        self.instances[event.worker] = instance
        device.instances.append(instance)
        self._devices[event.worker] = device
        up = events.WorkerUp(0.0, event.worker, declared.memory_bytes - served.model.weight_bytes, self.setting.slots)
        self._decide(event.model, up)
        self._decide(event.model, events.WorkerCapacityChanged(0.0, event.worker, 0))

    def _arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        request = SimulatedRequest(RequestId(f"r{index}"), arrival)
        self._requests[request.id] = request
        self._count(arrival.model, arrivals=1)
        size = request.blocks * self._block_bytes(arrival.model)
        self._decide(arrival.model, events.RequestArrived(self.now_s, request.id, size, arrival.lengths.prompt_tokens))

    def _epoch(self) -> None:
        """Let every device work for an epoch, tell what happened, and let all decide."""
        ended: list[tuple[SimulatedInstance, SimulatedRequest]] = []
        grown: dict[ModelName, dict[RequestId, int]] = {}
        for device in dict.fromkeys(self._devices.values()):
            steps, begun = device.pass_time(self.setting.epoch_s)
            for instance in device.instances:
                if instance.decoding:
                    over, sizes = instance.advance(steps)
                    if sizes:
                        grown.setdefault(instance.model, {}).update(sizes)
                    ended += [(instance, request) for request in over]
                    self._loads[instance.model]["step_s"] = instance.step_s()
            for instance, request in begun:
                request.first_token_s = request.first_token_s or self.now_s
                seconds = instance.profile.prefill_s(request.arrival.lengths.prompt_tokens)
                self._count(instance.model, prompts=1, prefill_s=seconds)
                instance.decode(request)
            for instance in device.instances:
                self.measures.preemptions += len(instance.overflow())
        for instance, request in ended:
            self._finish(instance, request)
        for model, scheduler in self.schedulers.items():
            if model in grown:
                self._decide(model, events.RequestsGrew(self.now_s, grown[model]))
            if scheduler.cluster.requests or scheduler.cluster.active or scheduler.cluster.draining:
                self._decide(model, events.EpochStarted(self.now_s))
        self._handle(e.ModelsMeasured(self.now_s, self._take_loads()))
        for instance in self.instances.values():
            self._admit(instance)
        awake = {one.id.rpartition("@")[2] for one in self.instances.values() if one.is_ready}
        self.measures.sample(self.now_s, awake)

    def _finish(self, instance: SimulatedInstance, request: SimulatedRequest) -> None:
        size = request.blocks * instance.block_bytes
        del self._requests[request.id]
        self.measures.ended(request, instance.profile, self.now_s)
        tokens = request.arrival.lengths.output_tokens
        self._count(instance.model, ended=1, output_tokens=tokens, held_bytes=size)
        self._decide(instance.model, events.RequestFinished(self.now_s, request.id, tokens, request.first_token_s))

    def _take_loads(self) -> dict[ModelName, ModelLoad]:
        for model, scheduler in self.schedulers.items():
            if waiting := len(scheduler.cluster.waiting):
                head = scheduler.cluster.waiting.head(scheduler.cluster.now_s)
                first_bytes = scheduler.cluster.requests[head].kv_bytes if head is not None else 0
                self._loads[model] |= {"waiting": waiting, "first_bytes": first_bytes}
        loads = {model: ModelLoad(**counts) for model, counts in self._loads.items() if counts}  # type: ignore[arg-type]
        self._loads = {model: {} for model in self._loads}
        return loads

    def _count(self, model: ModelName, **counts: float) -> None:
        load = self._loads[model]
        for name, count in counts.items():
            load[name] = load.get(name, 0) + count

    # ---- decisions

    def _decide(self, model: ModelName, event: AnyEvent) -> None:
        """Let the model's scheduler decide; tell the Landlord what it counts now, and of wishes."""
        for command in self.schedulers[model].handle(event):
            self._obey(command)
        cluster = self.schedulers[model].cluster
        for name, worker in cluster.workers.items():
            ahead_bytes = max(cluster.ahead_bytes, self._block_bytes(model))
            need = worker.used_bytes, worker.count * ahead_bytes, worker.count
            if need != self._told.get(name, (0, 0, 0)):
                self._told[name] = need
                self._handle(e.KvNeeded(self.now_s, name, *need))

    def _obey(self, command: events.AnyCommand) -> None:
        if isinstance(command, events.PlaceRequest):
            request = self._requests[command.request]
            request.worker = command.worker
            self.instances[command.worker].held.append(request)
            self._after(0.0, partial(self._admit, self.instances[command.worker]))
        elif isinstance(command, events.MoveRequest):
            self._requests[command.request].destination = command.destination
            took_s = command.kv_bytes / self.setting.link_bytes_per_s
            self._after(took_s, partial(self._end_move, command.request, command.destination))
        elif isinstance(command, events.ActivateWorker):
            self._handle(e.WorkerActivated(self.now_s, command.worker))
        elif isinstance(command, events.RefuseRequest | events.ShedRequest):
            del self._requests[command.request]

    def _handle(self, event: LandlordEvent) -> None:
        """Let the Landlord decide.  A newer offer replaces one that was not yet told."""
        for command in self.tenancy.handle(event):
            if isinstance(command, e.OfferCapacity):
                self._offers[command.worker] = command
            else:
                self._carry_out(command)
        while self._offers:
            offer = self._offers.pop(next(iter(self._offers)))
            model = self.instances[offer.worker].model
            self._decide(model, events.WorkerWakeTimeChanged(self.now_s, offer.worker, offer.wake_s))
            self._decide(model, events.WorkerCapacityChanged(self.now_s, offer.worker, offer.capacity_bytes))

    def _carry_out(self, command: LandlordCommand) -> None:
        instance = self.instances[command.worker]
        served = self._served[instance.model]
        if isinstance(command, e.GrantKv):
            assert not instance.granules & set(command.granules), "granted twice"
            instance.granules |= set(command.granules)
            self._after(0.0, partial(self._admit, instance))
        elif isinstance(command, e.TakeKv):
            self._after(self.setting.take_s, partial(self._return, instance, command.granules))
        elif isinstance(command, e.LoadModel):
            starts_s = self.setting.start_s(served, instance.id in self._dozing)
            self._after(starts_s, partial(self._load, instance))
        elif isinstance(command, e.DozeModel | e.UnloadModel):
            assert not instance.running, "running requests are cut"
            instance.is_ready = False
            dozes = isinstance(command, e.DozeModel)
            self._after(self.setting.doze_s(served) if dozes else 0.0, partial(self._leave, instance, dozes))
        elif isinstance(command, e.DrainInstance):
            self._decide(instance.model, events.WorkerDraining(self.now_s, instance.id))
        elif isinstance(command, e.ReopenInstance):
            self._decide(instance.model, events.WorkerResumed(self.now_s, instance.id))

    # ---- what takes time

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timed, (self.now_s + seconds, next(self._sequence), act))

    def _admit(self, instance: SimulatedInstance) -> None:
        for request in instance.admit():
            self._devices[instance.id].begin(instance, request)

    def _return(self, instance: SimulatedInstance, asked: int) -> None:
        spare = max(len(instance.granules) - instance.needed_granules(), 0)
        returned = tuple(sorted(instance.granules)[-min(asked, spare) :]) if spare else ()
        instance.granules -= set(returned)
        self._handle(e.KvReturned(self.now_s, instance.id, returned))

    def _load(self, instance: SimulatedInstance) -> None:
        self._dozing.discard(instance.id)
        self.measures.loads += 1
        instance.is_ready = True
        self._handle(e.ModelLoaded(self.now_s, instance.id))
        self._admit(instance)

    def _leave(self, instance: SimulatedInstance, dozes: bool) -> None:
        instance.granules.clear()
        if dozes:
            self._dozing.add(instance.id)
        self._handle(e.ModelDozed(self.now_s, instance.id) if dozes else e.ModelGone(self.now_s, instance.id))

    def _end_move(self, name: RequestId, destination: WorkerId) -> None:
        request = self._requests.get(name)
        if request is None or request.destination != destination:
            return
        assert request.worker is not None
        source, target = self.instances[request.worker], self.instances[destination]
        request.destination = None
        if not request.decodes:
            source.remove(request)
            target.held.append(request)
        elif target.is_ready and target.has_room(request.blocks):
            source.remove(request)
            target.attach(request)
        else:
            self._decide(source.model, events.MoveAborted(self.now_s, name, "no room", destination))
            return
        request.worker = destination
        self._decide(source.model, events.MoveCommitted(self.now_s, name, destination))

    def _block_bytes(self, model: ModelName) -> int:
        return BLOCK_TOKENS * self._served[model].model.bytes_per_token
