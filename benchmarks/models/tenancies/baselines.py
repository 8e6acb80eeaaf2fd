"""The ways of others, in the Landlord's place: a split made once, and swapping whole models.

split      every model is placed once and has its part of the device's KV memory for good (MuxServe's quotas)
fifo       a device holds one model; a request for another one drains it, then the models are swapped
collated   the same, but a model is served for a while before the next one's turn
"""

import abc
import math
from collections.abc import Mapping

from melld.errors import ConfigError
from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.events import LandlordCommand, LandlordEvent, Why
from melld.landlord.granules import GranuleLedger, usable_bytes
from melld.simulator.catalogue import BLOCK_TOKENS

LEAST_TOKENS = 2048
"""What an operator leaves even to a model that is hardly used: the longest request that it shall take."""
Commands = list[LandlordCommand]


class Baseline(abc.ABC):
    """A way to share devices, with one ledger for each device and the names of all instances."""

    def __init__(self) -> None:
        self.ledgers: dict[DeviceName, GranuleLedger] = {}
        self.models: dict[ModelName, e.ModelDeclared] = {}
        self.instances: dict[WorkerId, e.InstanceDeclared] = {}
        self.now_s = 0.0

    def handle(self, event: LandlordEvent) -> Commands:
        """See `simulation.Tenancy`."""
        self.now_s = event.at_s
        if isinstance(event, e.DeviceDeclared):
            self.ledgers[event.device] = GranuleLedger(event.memory_bytes, event.granule_bytes)
        elif isinstance(event, e.ModelDeclared):
            self.models[event.model] = event
        elif isinstance(event, e.InstanceDeclared):
            self.instances[event.worker] = event
        else:
            return self.act(event)
        return []

    @abc.abstractmethod
    def act(self, event: LandlordEvent) -> Commands:
        """Decide about an event other than a declaration."""

    def _give(self, worker: WorkerId, granules: int) -> Commands:
        """Grant granules for good, and offer them."""
        instance = self.instances[worker]
        ledger = self.ledgers[instance.device]
        offered_bytes = granules * usable_bytes(ledger.granule_bytes, self.models[instance.model].block_bytes)
        granted = ledger.grant(worker, granules)
        return [e.GrantKv(worker, Why.BIRTH, granted), e.OfferCapacity(worker, Why.BIRTH, offered_bytes, 0.0)]


class Split(Baseline):
    """Places every model once, the most wanted first, where most memory is left for its rate.

    `bytes_per_s`: KV bytes that each model wants in a second, as its operator expects.  `even`: equal parts of a
    device's KV memory instead of parts in proportion to that.
    """

    def __init__(self, bytes_per_s: Mapping[ModelName, float], even: bool = False) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._even = even
        self._placed: dict[WorkerId, int] = {}
        self._begun = False

    def act(self, event: LandlordEvent) -> Commands:
        """See `Baseline.act`."""
        if isinstance(event, e.ModelLoaded):
            return self._give(event.worker, self._placed[event.worker])
        if self._begun or not isinstance(event, e.ModelsMeasured):
            return []
        self._begun = True
        self._place()
        return [e.LoadModel(worker, Why.BIRTH) for worker in self._placed]

    def _place(self) -> None:
        wanted: dict[DeviceName, list[WorkerId]] = {device: [] for device in self.ledgers}
        for model in sorted(self.models, key=lambda name: -self._bytes_per_s[name]):
            fitting = [
                (self._pressure(model, one.device, wanted), name)
                for name, one in self.instances.items()
                if one.model == model
            ]
            pressure, worker = min(fitting)
            if pressure == math.inf:
                raise ConfigError("--sharing", f"{model} fits on no device beside the others")
            device = self.instances[worker].device
            wanted[device].append(worker)
            self.ledgers[device].reside(worker, self.models[model].resident_bytes)
        for device, workers in wanted.items():
            parts = {one: 1.0 if self._even else self._bytes_per_s[self.instances[one].model] for one in workers}
            self._share(device, parts)

    def _share(self, device: DeviceName, parts: dict[WorkerId, float]) -> None:
        """Share the device's granules in these parts; whoever would get less than `LEAST_TOKENS` gets those."""
        left = self.ledgers[device].free
        for worker, part in sorted(parts.items(), key=lambda item: item[1]):
            block_bytes = self.models[self.instances[worker].model].block_bytes
            least = -(-LEAST_TOKENS // BLOCK_TOKENS * block_bytes // self.ledgers[device].granule_bytes)
            share = max(math.floor(left * part / sum(parts.values())), min(least, left // len(parts)))
            self._placed[worker] = share
            left -= share
            del parts[worker]

    def _pressure(self, model: ModelName, device: DeviceName, wanted: dict[DeviceName, list[WorkerId]]) -> float:
        """Return the wanted bytes a second for each granule that the device would have."""
        ledger = self.ledgers[device]
        rate = self._bytes_per_s[model] + sum(self._bytes_per_s[self.instances[one].model] for one in wanted[device])
        left = ledger.limit - -(-self.models[model].resident_bytes // ledger.granule_bytes)
        return rate / left if left > len(wanted[device]) else math.inf


class Swap(Baseline):
    """Serves one model at a time on each device.

    `quantum_s`: how long a model is served while others wait; 0: first come.
    """

    def __init__(self, quantum_s: float) -> None:
        super().__init__()
        self._quantum_s = quantum_s
        self._waiting_since_s: dict[ModelName, float] = {}
        self._current: dict[DeviceName, WorkerId | None] = {}
        self._since_s: dict[DeviceName, float] = {}
        self._requests: dict[WorkerId, int] = {}
        self._leaving: set[WorkerId] = set()

    def act(self, event: LandlordEvent) -> Commands:
        """See `Baseline.act`."""
        if isinstance(event, e.ModelLoaded):
            device = self.instances[event.worker].device
            self._since_s[device] = event.at_s
            return self._give(event.worker, self.ledgers[device].free)
        if isinstance(event, e.KvNeeded):
            self._requests[event.worker] = event.requests
            return self._empty(event.worker) if event.worker in self._leaving else []
        if isinstance(event, e.ModelDozed) and self._current.get(self.instances[event.worker].device) == event.worker:
            return self._left(event.worker)
        return self._turn(event) if isinstance(event, e.ModelsMeasured) else []

    def _turn(self, event: e.ModelsMeasured) -> Commands:
        """Let the model that has waited longest have a device that is free, or whose model's turn is over."""
        loads = event.loads
        waiting = [name for name in self.models if name in loads and loads[name].waiting]
        self._waiting_since_s = {name: self._waiting_since_s.get(name, event.at_s) for name in waiting}
        served = {self.instances[one].model for one in self._current.values() if one is not None}
        commands: Commands = []
        for model in sorted(set(waiting) - served, key=lambda name: (self._waiting_since_s[name], name)):
            free = [device for device in self.ledgers if self._current.get(device) is None]
            if free:
                commands += self._load(model, free[0])
                continue
            over = [device for device in self.ledgers if self._is_over(device)]
            if over:
                device = min(over, key=lambda one: self._since_s[one])
                worker = self._current[device]
                assert worker is not None
                self._leaving.add(worker)
                commands += [e.DrainInstance(worker, Why.SWAPPED), *self._empty(worker)]
        return commands

    def _is_over(self, device: DeviceName) -> bool:
        worker = self._current.get(device)
        if worker is None or worker in self._leaving or device not in self._since_s:
            return False
        idle = not self._requests.get(worker) and self.instances[worker].model not in self._waiting_since_s
        return idle or self.now_s - self._since_s[device] >= self._quantum_s

    def _load(self, model: ModelName, device: DeviceName) -> Commands:
        worker = next(name for name, one in self.instances.items() if (one.model, one.device) == (model, device))
        self.ledgers[device].reside(worker, self.models[model].resident_bytes)
        self._current[device] = worker
        self._since_s.pop(device, None)
        return [e.LoadModel(worker, Why.WANTED)]

    def _empty(self, worker: WorkerId) -> Commands:
        if self._requests.get(worker):
            return []
        self._leaving.discard(worker)
        return [e.OfferCapacity(worker, Why.SWAPPED, 0, 0.0), e.DozeModel(worker, Why.SWAPPED)]

    def _left(self, worker: WorkerId) -> Commands:
        device = self.instances[worker].device
        self.ledgers[device].give_back_all(worker)
        self.ledgers[device].reside(worker, 0)
        self._current[device] = None
        back: Commands = [e.ReopenInstance(worker, Why.BACK)]
        waiting = sorted(self._waiting_since_s, key=lambda name: (self._waiting_since_s[name], name))
        served = {self.instances[one].model for one in self._current.values() if one is not None}
        following = next((name for name in waiting if name not in served), None)
        return back if following is None else [*back, *self._load(following, device)]
