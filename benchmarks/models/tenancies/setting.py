"""A setting with several models: what runs on what, and which requests come for which model."""

import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord.events import NEVER, DeviceDeclared, InstanceDeclared, LandlordEvent, ModelDeclared
from melld.landlord.granules import granule_bytes_for
from melld.simulator.catalogue import ACTIVATION_BYTES, BLOCK_TOKENS, MEMORY_UTILISATION, Card, Model
from melld.simulator.latency import LatencyProfile, profile_for
from melld.simulator.workload import Lengths, LogNormal, draw

START_S = 0.2
"""Of waking, beside the copy of the weights."""


class RatedModel(msgspec.Struct, frozen=True):
    """A model and its mean rate.  `keep_alive_s`, `pinned`, `weight`: as `ModelDeclared` has them."""

    name: ModelName
    model: Model
    rate_per_s: float
    keep_alive_s: float = 300.0
    pinned: bool = False
    weight: float = 1.0


class Setting(msgspec.Struct, frozen=True):
    """Models on equal devices.

    `host_bytes_per_s`, `disk_bytes_per_s`: how fast weights come from the machine's memory and from files.  `take_s`:
    from an order to take granules to the answer.  `link_bytes_per_s`: between devices.  `dozing`: every model dozes
    on one of the devices when the run begins.
    """

    models: tuple[RatedModel, ...]
    card: Card
    devices: int = 1
    epoch_s: float = 0.1
    slots: int = 256
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 2e9
    take_s: float = 0.05
    link_bytes_per_s: float = 10e9
    dozing: bool = False

    def profile(self, served: RatedModel) -> LatencyProfile:
        """Return the speed of the model on these devices."""
        return profile_for(served.model, self.card)

    def declarations(self) -> Iterator[LandlordEvent]:
        """Yield what the Landlord must know before anything happens."""
        blocks = {one.name: BLOCK_TOKENS * one.model.bytes_per_token for one in self.models}
        memory_bytes, granule_bytes = (
            int(self.card.memory_bytes * MEMORY_UTILISATION),
            granule_bytes_for(blocks.values()),
        )
        for device in self.device_names():
            yield DeviceDeclared(0.0, device, memory_bytes, granule_bytes)
        for one in self.models:
            yield ModelDeclared(
                0.0,
                one.name,
                resident_bytes=one.model.weight_bytes + ACTIVATION_BYTES,
                block_bytes=blocks[one.name],
                load_s=self.start_s(one, dozing=False),
                wake_s=self.start_s(one, dozing=True),
                weight=one.weight,
                pinned=one.pinned,
                keep_alive_s=one.keep_alive_s,
                stop_after_s=NEVER,
            )
        for one in self.models:
            for device in self.device_names():
                yield InstanceDeclared(0.0, instance_name(one.name, device), one.name, device)

    def device_names(self) -> list[DeviceName]:
        """Return the names of all devices."""
        return [DeviceName(f"gpu{index}") for index in range(self.devices)]

    def start_s(self, served: RatedModel, dozing: bool) -> float:
        """Return the seconds until the model serves."""
        return START_S + served.model.weight_bytes / (self.host_bytes_per_s if dozing else self.disk_bytes_per_s)

    def doze_s(self, served: RatedModel) -> float:
        """Return the seconds to copy the weights to the machine's memory."""
        return served.model.weight_bytes / self.host_bytes_per_s


class ModelArrival(msgspec.Struct, frozen=True, gc=False):
    """A request."""

    at_s: float
    model: ModelName
    lengths: Lengths


def instance_name(model: ModelName, device: DeviceName) -> WorkerId:
    """Return the name of the model's instance on the device."""
    return WorkerId(f"{model}@{device}")


def power_law(count: int, total_per_s: float, exponent: float) -> list[float]:
    """Return rates that fall with the rank's power: MuxServe's popularity."""
    parts = [rank**-exponent for rank in range(1, count + 1)]
    return [total_per_s * part / sum(parts) for part in parts]


Shape = Callable[[int, float], float]
"""(index of a model, time) -> its rate over its mean rate."""


def steady(_index: int, _at_s: float) -> float:
    """Return a Poisson process's constant rate."""
    return 1.0


def arrivals(
    models: Sequence[RatedModel],
    seconds: float,
    lengths: LogNormal | Sequence[Lengths],
    chance: random.Random,
    shape: Shape = steady,
    peak: float = 1.0,
) -> list[ModelArrival]:
    """Return the requests of all models, in order; `peak`: the most that `shape` gives for any model."""
    found = []
    for index, served in enumerate(models):
        at_s = chance.expovariate(served.rate_per_s * peak)
        while at_s < seconds:
            if chance.random() * peak < shape(index, at_s):
                found.append(ModelArrival(at_s, served.name, draw(lengths, chance)))
            at_s += chance.expovariate(served.rate_per_s * peak)
    return sorted(found, key=lambda one: one.at_s)
