"""Gives devices and models' workers to the Landlord: at the start, and when models are added.

Owns how GPUs are divided.  Decides nothing about which model is loaded: the Landlord does.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from melld.config import Config
from melld.daemon.devices import kind_of, make_slots, sized
from melld.daemon.model import ServedModel
from melld.daemon.sizes import block_bytes_of, device_memory_bytes, devices_declared, first_guess, model_declared
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.town.tenant import Tenant
from melld.engine.fleet.arena import AnyArena, Arena, GpuArena
from melld.engine.gpu_memory import NoSharedMemory
from melld.errors import ConfigError
from melld.ids import DeviceName
from melld.kvstore.device_reading import Device
from melld.landlord import events as e
from melld.landlord.division import Division, divide
from melld.landlord.granules import GRANULE_BLOCKS

Served = Mapping[ServedModel, Any]
"""Models with vLLM's configuration of each."""


class Letting:
    """The devices that one Landlord lets to models."""

    def __init__(self, landlord: LandlordShell, gpus: Sequence[Device]) -> None:
        self._landlord = landlord
        self._gpus = gpus

    async def begin(self, config: Config, models: Served) -> str:
        """Give the workers of several models to the Landlord, once vLLM has read the models' configurations.

        Return how GPUs are divided if the configuration does not say.

        Raises:
            ConfigError: a GPU does not have the memory to lend.
        """
        landlord = self._landlord
        landlord.division = msgspec.structs.replace(landlord.division, lent_bytes=config.devices.lent_bytes)
        if says_nothing := self._must_divide(config):
            landlord.division = division_of(config, self._gpus, lends=all(map(can_lend, models.values())))
        devices, uuids = self._devices(config, next(iter(models)), list(models.values()))
        arenas = {}
        if landlord.division.lent_bytes or not self._gpus:  # else each worker has KV memory of its own
            arenas = {one.device: await _arena(one, uuids[one.device]) for one in devices}
        landlord.take_over(devices, [], arenas)
        for model, vllm_config in models.items():
            self.let_in(model, vllm_config)
        return f"each GPU: {landlord.division.in_words(len(models))}" if says_nothing else ""

    def check_adoption(self, config: Config, alone: ServedModel) -> None:
        """Reject further models if they can never share the devices of the first.

        Raises:
            ConfigError: with the reason.
        """
        if any(len(place.slot.devices) > 1 for place in alone.parts.fleet.places.values()):
            raise ConfigError("[[models]]", f"workers of {alone.name}: it must be the only one")
        if self._must_divide(config):
            division_of(config, self._gpus, lends=False)

    def adopt(self, config: Config, alone: ServedModel, vllm_config: Any, others: Sequence[Any]) -> None:
        """Give a lone model's workers to the Landlord, when others are added.

        Those that run keep the memory that they have; their next processes share the devices.
        """
        fleet, landlord = alone.parts.fleet, self._landlord
        if self._must_divide(config):
            landlord.division = division_of(config, self._gpus, lends=False)
        devices, _ = self._devices(config, alone, [vllm_config, *others])
        cpu = config.devices.cpu
        if not self._gpus and (cpu is None or not cpu.memory_limit_bytes):  # what is free now is not all
            held = [ready.resident_bytes for ready in fleet.ready.values()]
            devices = [
                msgspec.structs.replace(one, memory_bytes=one.memory_bytes + max(held, default=0)) for one in devices
            ]
        arenas = {} if self._gpus else {one.device: Arena(one.memory_bytes, one.granule_bytes) for one in devices}
        landlord.take_over(devices, [], arenas)
        model = alone.parts.config.model
        slots = make_slots(config.alone(model), list(self._gpus), os.environ, 0, len(config.models))
        for place, slot in zip(fleet.places.values(), slots, strict=True):
            place.slot = slot
        self.let_in(alone, vllm_config, lends=False)
        for worker, ready in fleet.ready.items():
            landlord.worker_ready(worker, ready)

    def let_in(self, model: ServedModel, vllm_config: Any, *, lends: bool = True) -> None:
        """Give one model's workers to the Landlord.  `lends`: it shares KV memory with others, where supported."""
        landlord = self._landlord
        arenas = landlord.arenas if lends else {}
        for place in model.parts.fleet.places.values():
            spec = sized(place.slot.spec, landlord.division) if self._gpus else place.slot.spec
            if (arena := arenas.get(DeviceName(place.slot.device))) is not None:
                spec = msgspec.structs.replace(spec, arena=arena.spec())
            place.slot = msgspec.structs.replace(place.slot, spec=spec)
        slots, now_s = [place.slot for place in model.parts.fleet.places.values()], time.monotonic()
        instances = [e.InstanceDeclared(now_s, slot.worker, model.key, DeviceName(slot.device)) for slot in slots]
        told = self._declared(model, vllm_config, lends=bool(arenas))
        displaces = not landlord.division.lent_bytes
        tenant = Tenant(model, told.block_bytes, lends=bool(arenas), displaces=displaces)
        landlord.take_over([told, *instances], [tenant], {})
        model.parts.fleet.supervisor.let_to(landlord)

    def follow(self, model: ServedModel, vllm_config: Any) -> None:
        """Tell the Landlord the new settings of a model that it knows."""
        self._landlord.hear(self._declared(model, vllm_config, lends=self._landlord.tenants[model.key].lends))

    def _declared(self, model: ServedModel, vllm_config: Any, *, lends: bool) -> e.ModelDeclared:
        config, lent = model.parts.config, self._landlord.division.lent_bytes
        spec = next(iter(model.parts.fleet.places.values())).slot.spec
        own = 0 if lends else int(spec.engine_arguments["kv_cache_memory_bytes"])
        most = max(one.ledger.granule_bytes // GRANULE_BLOCKS for one in self._landlord.landlord.houses.values())
        block_bytes = min(block_bytes_of(vllm_config), most)  # one with larger blocks has KV memory of its own
        return model_declared(config, kind_of(self._gpus), model.key, block_bytes, own, lent, time.monotonic())

    def _must_divide(self, config: Config) -> bool:
        return bool(self._gpus) and not config.devices.lent_bytes and lacks_sizes(config)

    def _devices(
        self, config: Config, first: ServedModel, vllm_configs: Sequence[Any]
    ) -> tuple[list[e.DeviceDeclared], dict[DeviceName, Sequence[str]]]:
        """Return the devices' declarations for the Landlord, and the GPUs of each."""
        slots = [place.slot for place in first.parts.fleet.places.values()]
        lent = self._landlord.division.lent_bytes
        blocks = [block_bytes_of(vllm_config) for vllm_config in vllm_configs]
        names = [slot.device for slot in slots]
        declared = devices_declared(config, self._gpus, names, blocks, lent, time.monotonic())
        return declared, {DeviceName(slot.device): slot.uuids for slot in slots}


async def _arena(device: e.DeviceDeclared, uuids: Sequence[str]) -> AnyArena:
    if not uuids:
        return Arena(device.memory_bytes, device.granule_bytes)
    try:
        return await asyncio.to_thread(GpuArena, uuids[0], device.memory_bytes, device.granule_bytes)
    except NoSharedMemory as error:
        raise ConfigError("[devices] lent_kv_bytes", f"{device.device} has no memory to lend: {error}") from error


def lacks_sizes(config: Config) -> bool:
    """Return True if a model shares GPUs without a configured amount of KV memory."""
    return any(model.vllm_option("kv_cache_memory_bytes") is None for model in config.served)


def can_lend(vllm_config: Any) -> bool:
    """Return True if the model's layers are of plain full attention, as vLLM's configuration describes them."""
    model = vllm_config.model_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    special = model.has_inner_state, model.is_attention_free, model.is_encoder_decoder, model.get_sliding_window()
    return not any(special) and kinds <= {"full_attention"} and vllm_config.speculative_config is None


def division_of(config: Config, gpus: Sequence[Device], *, lends: bool) -> Division:
    """Return how each GPU is divided; the smallest decides.  Sizes that are configured, or dozing, rule out lending.

    Raises:
        ConfigError: no model fits.
    """
    given = {model.names[0]: int(model.vllm_option("kv_cache_memory_bytes") or 0) for model in config.served}
    held = [first_guess(config, model, "cuda") + given[model.names[0]] for model in config.served]
    memory = min(device_memory_bytes(config, gpus))
    division = divide(memory, held, lends=lends and not any(given.values()) and not config.idle.cached_bytes)
    if not division.together:
        told = ", ".join(f"{size / 2**20:,.0f}" for size in sorted(held))
        why = f"no model leaves room for KV memory on a GPU with {memory / 2**20:,.0f} MiB: they take {told} MiB"
        raise ConfigError("[[models]]", why)
    return division
