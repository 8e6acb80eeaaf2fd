"""Wires the daemon below its API.

Owns the wiring.  Starts nothing.

    for each model:  scheduler, planner ─► fleet ─► executor ─► driver ─► idle workers, boundaries ─► why
    for all:         devices, template process ─► models ─► watch, metrics
"""

import asyncio
import logging
import math
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import prometheus_client

from melld import __version__
from melld.cluster.cluster import Cluster
from melld.config import Config, ModelConfig
from melld.daemon.boundaries import boundary_settings
from melld.daemon.devices import find_gpus, kind_of, sized, slots_by_model, worker_environment
from melld.daemon.history import History
from melld.daemon.machines import Machines
from melld.daemon.metrics import Metrics
from melld.daemon.model import ModelParts, ServedModel
from melld.daemon.preflight import scheduler_settings
from melld.daemon.sizes import block_bytes_of, devices_declared, fitted, model_declared
from melld.daemon.town.dividing import can_lend, division_of, lacks_sizes, lending
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.town.tenant import Tenant
from melld.daemon.watch import Condition, Identity, Watch
from melld.daemon.why import Explainer
from melld.decisions.file import DecisionLogFile
from melld.decisions.recorder import recording
from melld.decisions.records import header_record
from melld.decisions.stories import Stories
from melld.driver.boundaries import BoundaryKeeper
from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.idle import IdleWorkers
from melld.driver.report import MoveMeters
from melld.engine.arguments import async_scheduling_told
from melld.engine.fleet.arena import AnyArena, Arena, GpuArena
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Slot
from melld.engine.frontend.codec import EngineCodec
from melld.engine.gpu_memory import NoSharedMemory
from melld.engine.host.local import LocalHost
from melld.engine.host.ports import Host
from melld.engine.host.template import TemplateProcess
from melld.engine.pin import check_build
from melld.errors import ConfigError
from melld.ids import DeviceName
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml
from melld.landlord import events as e
from melld.landlord.division import Division
from melld.landlord.events import NEVER, DeviceDeclared
from melld.landlord.granules import GRANULE_BLOCKS
from melld.landlord.landlord import Landlord
from melld.landlord.tenure import LandlordSettings
from melld.migrate.boundaries import Boundaries
from melld.migrate.planner import Planner
from melld.scheduler.idle import SLEEP_AFTER_S, IdleSettings
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.scheduler import Scheduler

log = logging.getLogger("melld")


class DaemonParts(NamedTuple):
    """The parts of one daemon."""

    template: TemplateProcess
    models: list[ServedModel]
    """Those that calls may ask now, for all who read it."""
    watch: Watch
    metrics: Metrics
    shared: "CommonParts"
    landlord: LandlordShell | None = None
    """None with one model."""
    gpus: Sequence[Device] = ()
    cluster: Cluster | None = None
    machines: Machines | None = None
    """Of the cluster."""


class CommonParts(NamedTuple):
    """Parts that all models have in common."""

    gpus: list[Device]
    nvml: Nvml
    host: Host
    meters: MoveMeters
    clock: Callable[[], float]
    landlord: LandlordShell | None
    """Which owns the workers of several models."""
    client_names: Callable[[], Collection[str]] = tuple
    """Those that the configuration has now."""


def make_parts(
    config: Config, url: str, condition: Condition, client_names: Callable[[], Collection[str]]
) -> DaemonParts:
    """Make all parts, for the configured or found devices; `client_names` returns the present configuration's.

    Raises:
        ConfigError: a configured device is not there, or a model is larger than any.
    """
    nvml, clock = Nvml(), time.monotonic
    gpus = find_gpus(config.devices, nvml, os.environ)
    kind, count = kind_of(gpus), len(config.served)
    check_build(kind)
    config = fitted(config, gpus)
    alone = [config.alone(model) for model in config.served]
    slots = slots_by_model(config, gpus, os.environ)
    environment = worker_environment(kind, os.environ, lends=bool(config.devices.lent_bytes))
    os.environ.update(environment)  # for the workers, and vLLM's processors here, before it is imported
    template = TemplateProcess(kind)
    landlord = None
    if count > 1:
        cached_bytes = config.idle.cached_bytes if gpus else NEVER  # on a CPU what dozes keeps no weights
        landlord = LandlordShell(
            Landlord(LandlordSettings(host_cache_bytes=cached_bytes, itl_target_s=config.targets.itl_s)), clock
        )
    meters = MoveMeters(prometheus_client.REGISTRY)
    shared = CommonParts(gpus, nvml, LocalHost(template), meters, clock, landlord, client_names)
    made = [make_model(*pair, shared, condition, count) for pair in zip(alone, slots, strict=True)]
    models = [ServedModel(parts) if landlord is None else ServedModel(parts, landlord.want) for parts in made]
    identity = Identity(
        pid=os.getpid(),
        policy=config.scheduler.policy,
        url=url,
        started_s=clock(),
        async_scheduling=async_scheduling_told(alone[0], kind),
    )
    cluster, machines = None, None
    if config.cluster.address is not None:
        machines = Machines(alone[0], os.environ, made[0].fleet)
        cluster = Cluster(config.cluster, kind, [config.model], environment, machines)
    watch = Watch(models, identity, condition, nvml if gpus else None, landlord, machines)
    metrics = Metrics(watch, models, landlord)
    return DaemonParts(template, models, watch, metrics, shared, landlord, gpus, cluster, machines)


def prepare_frontends(parts: DaemonParts) -> list[tuple[Any, Namespace]]:
    """Import vLLM and check each model's configuration with it.  Takes seconds: to be called in a thread."""
    from melld.engine.frontend.rehearsal import prepare

    return [prepare(model.parts.config, kind_of(parts.gpus)) for model in parts.models]


async def let_devices(parts: DaemonParts, config: Config, prepared: Sequence[tuple[Any, Any]]) -> str:
    """Give the workers of several models to the Landlord, now that vLLM has read what the models are like.

    Return how GPUs are divided if the configuration does not say.

    Raises:
        ConfigError: a GPU does not have the memory to lend.
    """
    assert parts.landlord is not None
    blocks = [block_bytes_of(vllm_config) for vllm_config, _ in prepared]
    slots = [place.slot for place in parts.models[0].parts.fleet.places.values()]
    division = Division(lent_bytes=config.devices.lent_bytes)
    if says_nothing := bool(parts.gpus) and not division.lent_bytes and lacks_sizes(config):
        division = division_of(config, parts.gpus, lends=all(can_lend(vllm_config) for vllm_config, _ in prepared))
        config = msgspec.structs.replace(config, devices=lending(config.devices, division))
    parts.landlord.courier.division = division
    devices = devices_declared(config, parts.gpus, [slot.device for slot in slots], blocks, time.monotonic())
    arenas = {}
    if config.devices.lent_bytes or not parts.gpus:  # else each worker has KV memory of its own
        uuids = {slot.device: slot.uuids for slot in slots}
        arenas = {one.device: await _arena(one, uuids[one.device]) for one in devices}
    parts.landlord.take_over(devices, [], arenas)
    for model, (vllm_config, _) in zip(parts.models, prepared, strict=True):
        let_in(parts, model, vllm_config)
    return f"each GPU: {division.in_words(len(parts.models))}" if says_nothing else ""


def let_in(parts: DaemonParts, model: ServedModel, vllm_config: Any, *, is_known: bool = False) -> None:
    """Give the workers of one model to the Landlord; of one that is known, tell it the new settings."""
    assert parts.landlord is not None
    config, arenas, now_s = model.parts.config, parts.landlord.courier.arenas, time.monotonic()
    division = parts.landlord.courier.division
    config = msgspec.structs.replace(config, devices=lending(config.devices, division))
    places = model.parts.fleet.places.values()
    for place in places:
        if parts.gpus and not is_known:
            place.slot = msgspec.structs.replace(place.slot, spec=sized(place.slot.spec, division))
        if (arena := arenas.get(DeviceName(place.slot.device))) is not None:
            spec = msgspec.structs.replace(place.slot.spec, arena=arena.spec())
            place.slot = msgspec.structs.replace(place.slot, spec=spec)
    slots = [place.slot for place in places]
    own = 0 if arenas else int(slots[0].spec.engine_arguments["kv_cache_memory_bytes"])
    most = max(one.ledger.granule_bytes // GRANULE_BLOCKS for one in parts.landlord.landlord.houses.values())
    block_bytes = min(block_bytes_of(vllm_config), most)  # one with larger blocks has KV memory of its own
    told = model_declared(config, kind_of(parts.gpus), model.key, block_bytes, own, now_s)
    if is_known:
        parts.landlord.hear(told)
        return
    instances = [e.InstanceDeclared(now_s, slot.worker, model.key, DeviceName(slot.device)) for slot in slots]
    tenant = Tenant(model, block_bytes, lends=bool(arenas), displaces=not config.devices.lent_bytes)
    parts.landlord.take_over([told, *instances], [tenant], {})


async def _arena(device: DeviceDeclared, uuids: Sequence[str]) -> AnyArena:
    if not uuids:
        return Arena(device.memory_bytes, device.granule_bytes)
    try:
        return await asyncio.to_thread(GpuArena, uuids[0], device.memory_bytes, device.granule_bytes)
    except NoSharedMemory as error:
        raise ConfigError("[devices] lent_kv_bytes", f"{device.device} has no memory to lend: {error}") from error


def make_model(
    config: Config, slots: Sequence[Slot], shared: CommonParts, condition: Condition, models: int = 1
) -> ModelParts:
    """Make the parts of one of `models` models; `config` is of this model alone."""
    settings, clock = config.scheduler, shared.clock
    epoch_s = settings.epoch_ms / 1e3
    scheduler = Scheduler(POLICIES[settings.policy], scheduler_settings(config))
    history = History(scheduler, clock, shared.client_names)
    decisions = _open_decision_log(config, scheduler, condition, is_one_of_several=models > 1)
    stories = Stories(settings.stories_kept)
    taps = [recording(stories.take, *([decisions.take] if decisions is not None else [])), history.heard]

    # The fleet and its driver know each other: the fleet asks for the driver when its first event happens.
    limit_s = None if settings.policy == MellSlo.name else config.targets.itl_s
    aware = settings.prefix_aware and settings.policy == MellSlo.name
    owner, codec = shared.landlord, EngineCodec()
    fleet = Fleet(slots, shared.host, codec, lambda: driver, clock, config.health, limit_s, aware, owner)
    planner = Planner(Boundaries().for_epochs_of(epoch_s))
    executor = Executor(fleet, clock, shared.meters, config.migration.max_moves_per_link)
    on_rest = () if owner is None else (owner.tell_offers,)
    driver = Driver(scheduler, fleet, executor, planner, taps, clock, epoch_s, *on_rest)

    rest_s = config.idle.sleep_after_s
    stop_after_s = config.idle.stop_after_s if models == 1 else math.inf  # of several the Landlord stops workers
    idle_settings = IdleSettings(SLEEP_AFTER_S if rest_s is None else rest_s, stop_after_s)
    idle = IdleWorkers(fleet, scheduler.cluster, idle_settings, clock)
    links = shared.nvml.links([gpu.uuid for gpu in shared.gpus])
    limits = boundary_settings(config, slots, shared.gpus, links, os.environ)
    if models > 1:
        # Beside other models' requests no figure would hold, and copying free blocks would take memory for them.
        limits = msgspec.structs.replace(limits, file=beside(limits.file, config.model), measure_unasked=False)
    if config.cluster.address is not None:
        # Nobody knows beforehand which machines join.
        limits = msgspec.structs.replace(limits, file=limits.file.with_stem("boundaries-cluster"), read=False)
    return ModelParts(
        config=config,
        fleet=fleet,
        driver=driver,
        cluster=scheduler.cluster,
        idle=idle,
        boundaries=BoundaryKeeper(fleet, planner, limits, clock),
        history=history,
        stories=stories,
        why=Explainer(scheduler, driver, history, stories, idle, clock),
        decisions=decisions,
    )


def _open_decision_log(
    config: Config, scheduler: Scheduler, condition: Condition, *, is_one_of_several: bool
) -> DecisionLogFile | None:
    """Open the decision log if one is configured: with several models, one beside it for each."""
    settings = config.scheduler
    if settings.decision_log is None:
        return None

    def warn(what: str) -> None:
        log.warning("%s", what)
        condition.warnings.append(what)

    header = header_record(settings.policy, scheduler.settings, time.monotonic(), time.time(), __version__)
    path = Path(settings.decision_log)
    if is_one_of_several:
        path = beside(path, config.model)
    return DecisionLogFile(path, header, warn)


def beside(path: Path, model: ModelConfig) -> Path:
    """Return the file of one of several models, beside where that of a lone model would be."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", model.names[0])
    return path.with_stem(f"{path.stem}-{name}")
