"""Wires the daemon below its API.

Owns the wiring and the operations of the control socket.  Starts nothing.

    scheduler, planner ─► fleet ─► executor ─► driver ─► idle workers, boundaries ─► why, watch
"""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import prometheus_client

from melld import __version__
from melld.config import Config, SchedulerConfig
from melld.control.messages import AlreadyThere, AskStory, Drain, Drained, Migrate, Profile, Profiled, Resume, Resumed
from melld.control.server import Operation
from melld.daemon.boundaries import boundary_settings
from melld.daemon.devices import find_gpus, make_slots
from melld.daemon.history import History
from melld.daemon.metrics import Metrics
from melld.daemon.preflight import scheduler_settings
from melld.daemon.watch import Condition, Identity, Watch
from melld.daemon.why import Why
from melld.decisions.file import DecisionLogFile
from melld.decisions.recorder import recording
from melld.decisions.records import header_record
from melld.decisions.stories import Stories, Story
from melld.driver.boundaries import BoundaryKeeper
from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.idle import IdleWorkers
from melld.driver.report import MoveMeters, MoveReport
from melld.engine.arguments import async_scheduling_told
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.template import TemplateProcess
from melld.engine.frontend.codec import EngineCodec
from melld.ids import RequestId, WorkerId
from melld.kvstore.nvml import Nvml
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
    fleet: Fleet
    driver: Driver
    idle: IdleWorkers
    boundaries: BoundaryKeeper
    watch: Watch
    metrics: Metrics
    decisions: DecisionLogFile | None
    stories: Stories


def make_parts(config: Config, url: str, condition: Condition) -> DaemonParts:
    """Make all parts, for the configured or found devices.

    Raises:
        ConfigError: a configured device is not there.
    """
    nvml, clock = Nvml(), time.monotonic
    gpus = find_gpus(config.devices, nvml, os.environ)
    slots = make_slots(config, gpus, os.environ)
    os.environ.update(slots[0].spec.environment)  # for vLLM's processors in this process, before it is imported
    template = TemplateProcess(slots[0].spec.device_kind, slots[0].spec.environment)

    settings = config.scheduler
    epoch_s = settings.epoch_ms / 1e3
    scheduler = Scheduler(POLICIES[settings.policy], scheduler_settings(config))
    history = History(scheduler, clock)
    decisions = _open_decision_log(settings, scheduler, condition)
    stories = Stories(settings.stories_kept)
    taps = [recording(stories.take, *([decisions.take] if decisions is not None else [])), history.heard]

    # The fleet and its driver know each other: the fleet asks for the driver when its first event happens.
    limit_s = None if settings.policy == MellSlo.name else config.targets.itl_s
    fleet = Fleet(slots, template, EngineCodec(), lambda: driver, clock, config.health, limit_s)
    planner = Planner(Boundaries().for_epochs_of(epoch_s))
    meters = MoveMeters(prometheus_client.REGISTRY)
    executor = Executor(fleet, clock, meters, config.migration.max_moves_per_link)
    driver = Driver(scheduler, fleet, executor, planner, taps, clock, epoch_s)

    rest_s = config.idle.sleep_after_s
    idle_settings = IdleSettings(SLEEP_AFTER_S if rest_s is None else rest_s, config.idle.stop_after_s)
    idle = IdleWorkers(fleet, scheduler.cluster, idle_settings, clock)
    links = nvml.links([gpu.uuid for gpu in gpus])
    limits = boundary_settings(config, slots, gpus, links, os.environ)
    boundaries = BoundaryKeeper(fleet, planner, limits, clock)
    why = Why(scheduler, driver, history, stories, idle, clock)
    identity = _identity(config, slots[0].spec.device_kind, url, clock())
    watch = Watch(fleet, driver, history, why, boundaries, identity, condition, nvml if gpus else None)
    metrics = Metrics(watch, driver.queue, fleet.reports, history.attainment)
    return DaemonParts(template, fleet, driver, idle, boundaries, watch, metrics, decisions, stories)


def _identity(config: Config, device_kind: str, url: str, now_s: float) -> Identity:
    return Identity(
        pid=os.getpid(),
        models=config.model.names,
        policy=config.scheduler.policy,
        url=url,
        started_s=now_s,
        async_scheduling=async_scheduling_told(config, device_kind),
    )


def _open_decision_log(settings: SchedulerConfig, scheduler: Scheduler, condition: Condition) -> DecisionLogFile | None:
    """Open the decision log if one is configured."""
    if settings.decision_log is None:
        return None

    def warn(what: str) -> None:
        log.warning("%s", what)
        condition.warnings.append(what)

    header = header_record(settings.policy, scheduler.settings, time.monotonic(), time.time(), __version__)
    return DecisionLogFile(Path(settings.decision_log), header, warn)


def operations_of(parts: DaemonParts) -> Mapping[str, Operation]:
    """Return the operations behind `melld migrate`, `profile`, `drain`, `resume` and `why`."""

    async def migrate(asked: Migrate) -> MoveReport | AlreadyThere:
        return await parts.driver.migrate(RequestId(asked.request), WorkerId(asked.worker), asked.via)

    async def profile(asked: Profile) -> Profiled:
        return await parts.boundaries.measure() if asked.measure else parts.boundaries.report()

    async def drain(asked: Drain) -> Drained:
        return await parts.driver.drains.drain(WorkerId(asked.worker), asked.wait, asked.deadline_s)

    async def resume(asked: Resume) -> Resumed:
        return await parts.driver.drains.resume(WorkerId(asked.worker))

    async def why(asked: AskStory) -> Story:
        return parts.stories.story(asked.request)

    return {
        "why": Operation(AskStory, why),
        "migrate": Operation(Migrate, migrate),
        "profile": Operation(Profile, profile),
        "drain": Operation(Drain, drain),
        "resume": Operation(Resume, resume),
    }
