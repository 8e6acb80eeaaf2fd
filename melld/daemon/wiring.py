"""Wires the daemon below its API.

Owns the wiring.  Starts nothing.

    for each model:  scheduler, planner ─► fleet ─► executor ─► driver ─► idle workers ─► why
    for all:         devices, template process ─► models ─► watch, metrics
"""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import prometheus_client

from melld import __version__
from melld.cluster.cluster import Cluster
from melld.config import Config, ModelConfig
from melld.daemon.devices import find_gpus, kind_of, make_slots, slots_by_model, worker_environment
from melld.daemon.history import History
from melld.daemon.machines import Machines
from melld.daemon.metrics import Metrics
from melld.daemon.model import ModelParts, ServedModel
from melld.daemon.preflight import scheduler_settings
from melld.daemon.sizes import fitted
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.town.letting import Letting
from melld.daemon.watch import Condition, Identity, Watch
from melld.daemon.why import Explainer
from melld.decisions.file import DecisionLogFile
from melld.decisions.recorder import recording
from melld.decisions.records import header_record
from melld.decisions.stories import Stories
from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.idle import SLEEP_AFTER_S, IdleSettings, IdleWorkers
from melld.driver.loans import Loans
from melld.driver.report import MoveMeters
from melld.engine.arguments import async_scheduling_told
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Slot
from melld.engine.frontend.codec import EngineCodec
from melld.engine.host.local import LocalHost
from melld.engine.host.ports import Host
from melld.engine.host.template import TemplateProcess
from melld.engine.pin import check_build
from melld.errors import MelldError
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml
from melld.landlord.events import NEVER
from melld.landlord.landlord import Landlord
from melld.landlord.placement import LandlordSettings
from melld.migrate.boundaries import Boundaries
from melld.migrate.planner import Planner
from melld.migrate.topology import segments_of
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from melld.engine.frontend.prepared import Prepared

log = logging.getLogger("melld")


class DaemonParts(NamedTuple):
    """The parts of one daemon."""

    template: TemplateProcess
    models: list[ServedModel]
    """Those that calls may ask now, for all who read it."""
    watch: Watch
    metrics: Metrics
    shared: "CommonParts"
    landlord: LandlordShell
    letting: Letting
    gpus: Sequence[Device]
    machines: Machines
    cluster: Cluster | None


class CommonParts(NamedTuple):
    """Parts that all models have in common."""

    gpus: list[Device]
    nvml: Nvml
    host: Host
    meters: MoveMeters
    clock: Callable[[], float]
    landlord: LandlordShell
    """Which owns the workers of several models."""
    loans: Loans
    client_names: Callable[[], Collection[str]] = tuple
    """Those that the configuration has now."""


def make_parts(
    config: Config, url: str, condition: Condition, client_names: Callable[[], Collection[str]]
) -> DaemonParts:
    """Make all parts, for the configured or found devices; `client_names` returns the current ones.

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
    environment = worker_environment(kind, os.environ)
    os.environ.update(environment)  # for the workers, and vLLM's processors here, before it is imported
    template = TemplateProcess(kind)
    cached_bytes = config.idle.cached_bytes if gpus else NEVER  # on a CPU what dozes keeps no weights
    settings = LandlordSettings(host_cache_bytes=cached_bytes, itl_target_s=config.targets.itl_s)
    landlord = LandlordShell(Landlord(settings), clock)
    meters = MoveMeters(prometheus_client.REGISTRY)
    shared = CommonParts(gpus, nvml, LocalHost(template), meters, clock, landlord, Loans(clock), client_names)
    made = [make_model(*pair, shared, condition, count) for pair in zip(alone, slots, strict=True)]
    for decisions in filter(None, (parts.decisions for parts in made)):
        decisions.begin()
    models = [ServedModel(parts, landlord.want) for parts in made]
    identity = Identity(
        pid=os.getpid(),
        policy=config.scheduler.policy,
        url=url,
        started_s=clock(),
        async_scheduling=async_scheduling_told(alone[0], kind),
    )
    cluster, machines = None, Machines(alone[0], os.environ, made[0].fleet)
    if config.cluster.address is not None:
        cluster = Cluster(config.cluster, kind, [config.model], environment, machines)
    watch = Watch(models, identity, condition, nvml if gpus else None, landlord, machines)
    metrics = Metrics(watch, models, landlord)
    letting = Letting(landlord, gpus)
    return DaemonParts(template, models, watch, metrics, shared, landlord, letting, gpus, machines, cluster)


class NotImported(MelldError):
    """vLLM cannot be imported here."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"cannot import vLLM: {error}")


def prepare_frontends(parts: DaemonParts) -> list["Prepared"]:
    """Import vLLM and check each model's configuration with it.  Takes seconds: to be called in a thread.

    Raises:
        NotImported, ConfigError
    """
    try:
        from melld.engine.frontend.rehearsal import prepare
    except (ImportError, OSError) as error:  # a damaged environment, or a cache directory that cannot be made
        raise NotImported(error) from error
    return [prepare(model.parts.config, kind_of(parts.gpus)) for model in parts.models]


def make_model(
    config: Config, slots: Sequence[Slot], shared: CommonParts, condition: Condition, models: int = 1
) -> ModelParts:
    """Make the parts of one of `models` models, whose decision log is yet to begin; `config` is of it alone."""
    settings, clock = config.scheduler, shared.clock
    epoch_s = settings.epoch_ms / 1e3
    scheduler = Scheduler(POLICIES[settings.policy], scheduler_settings(config))
    history = History(scheduler, clock, shared.client_names)
    decisions = _decision_log(config, scheduler, condition, is_one_of_several=models > 1)
    stories = Stories(settings.stories_kept)
    taps = [recording(scheduler, stories.take, *([decisions.take] if decisions is not None else [])), history.heard]

    # The fleet and its driver know each other: the fleet asks for the driver when its first event happens.
    limit_s = None if settings.policy == MellSlo.name else config.targets.itl_s
    aware = settings.prefix_aware and settings.policy == MellSlo.name
    codec = EngineCodec()
    fleet = Fleet(slots, shared.host, codec, lambda: driver, clock, config.health, limit_s, aware)
    links = shared.nvml.links([gpu.uuid for gpu in shared.gpus])
    segments, migration = segments_of({slot.worker: slot.uuid for slot in slots}, links), config.migration
    planner = Planner(Boundaries.assumed(epoch_s, migration.step_slowdown, migration.link_limit_bytes_per_s, segments))
    executor = Executor(fleet, clock, shared.meters, config.migration.max_moves_per_link)
    told = shared.landlord.tell_offers
    driver = Driver(scheduler, fleet, executor, planner, taps, clock, epoch_s, told, shared.loans)

    rest_s = config.idle.sleep_after_s
    idle_settings = IdleSettings(SLEEP_AFTER_S if rest_s is None else rest_s, config.idle.stop_after_s)
    idle = IdleWorkers(fleet, scheduler.cluster, idle_settings, clock)
    return ModelParts(
        config=config,
        fleet=fleet,
        driver=driver,
        cluster=scheduler.cluster,
        idle=idle,
        history=history,
        stories=stories,
        why=Explainer(scheduler, driver, history, idle, clock),
        decisions=decisions,
    )


def make_candidate(
    config: Config, wanted: ModelConfig, number: int, shared: CommonParts, condition: Condition
) -> ServedModel:
    """Make a model that a running daemon may serve.

    It is not pinned yet: others would be unloaded for it.
    """
    alone, count = config.alone(msgspec.structs.replace(wanted, pinned=False)), max(len(config.models), 2)
    slots = make_slots(alone, shared.gpus, os.environ, number, count)
    name, tenants = wanted.names[0], shared.landlord.tenants
    made = make_model(alone, slots, shared, condition, count)
    return ServedModel(made, shared.landlord.want, f"{name}#{number}" if name in tenants else name)


def _decision_log(
    config: Config, scheduler: Scheduler, condition: Condition, *, is_one_of_several: bool
) -> DecisionLogFile | None:
    """Return the decision log if one is configured; with several models, one file each."""
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
    """Return the file of one of several models, next to where a lone model's would be."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", model.names[0])
    return path.with_stem(f"{path.stem}-{name}")
