"""What the daemon consists of below its API, put together.

Owns the wiring, and what an operator can ask of it over the control socket.  Starts nothing.

    fleet ─► executor ─► driver ─► idle workers, drains, boundaries ─► watch
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import prometheus_client

from melld import __version__
from melld.config import Config
from melld.control.messages import AlreadyThere, Drain, Drained, Migrate, Profile, Profiled, Resume, Resumed
from melld.control.server import Operation
from melld.daemon.boundaries import keep_boundaries
from melld.daemon.devices import find_gpus, make_slots
from melld.daemon.preflight import scheduler_settings
from melld.daemon.watch import Identity, Watch
from melld.daemon.why import Why
from melld.decisions.file import DecisionLogFile
from melld.decisions.records import header_record
from melld.driver.boundaries import BoundaryKeeper
from melld.driver.drain import Drains
from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.idle import IdleWorkers
from melld.driver.report import MoveMeters, MoveReport
from melld.engine.arguments import async_scheduling_told
from melld.engine.fleet.fleet import Fleet
from melld.ids import RequestId, WorkerId
from melld.kvstore.nvml import Nvml
from melld.scheduler.idle import IdleSettings

log = logging.getLogger("melld")


class Parts(NamedTuple):
    """One daemon's."""

    fleet: Fleet
    driver: Driver
    idle: IdleWorkers
    drains: Drains
    boundaries: BoundaryKeeper
    watch: Watch


def make_parts(config: Config) -> Parts:
    """All of them, on the devices that the configuration and the machine give.

    Raises:
        ConfigError: a device is asked for that is not there.
    """
    nvml = Nvml()
    gpus = find_gpus(config.devices, nvml, os.environ)
    slots = make_slots(config, gpus, os.environ)
    os.environ.update(slots[0].spec.environment)  # for vLLM's processors in this process, before it is imported
    scheduler, clock = config.scheduler, time.monotonic
    fleet = Fleet(slots, clock, config.health)
    fleet.reports.itl_target_s = scheduler.itl_target_ms / 1e3 if scheduler.itl_target_ms else None
    executor = Executor(fleet, clock, MoveMeters(prometheus_client.REGISTRY), config.migration.max_moves_per_link)
    epoch_s = scheduler.epoch_ms / 1e3
    driver = Driver(fleet, executor, scheduler.policy, clock, epoch_s=epoch_s, settings=scheduler_settings(config))
    idle = IdleWorkers(fleet, driver, IdleSettings(config.idle.sleep_after_s, config.idle.stop_after_s), clock)
    drains = Drains(driver, fleet, clock)
    why = Why(driver, drains, clock)
    why.outlook = idle.outlook
    identity = Identity(
        pid=os.getpid(),
        models=config.model.names,
        started_s=clock(),
        async_scheduling=async_scheduling_told(config, slots[0].spec.device_kind),
    )
    watch = Watch(fleet, driver, why, identity, nvml if gpus else None)
    boundaries = keep_boundaries(config, fleet, driver, gpus, nvml.links([gpu.uuid for gpu in gpus]), os.environ)
    watch.boundaries = boundaries.line
    return Parts(fleet, driver, idle, drains, boundaries, watch)


def operations_of(parts: Parts) -> Mapping[str, Operation]:
    """What `melld migrate`, `profile`, `drain` and `resume` ask for."""

    async def migrate(asked: Migrate) -> MoveReport | AlreadyThere:
        return await parts.driver.migrate(RequestId(asked.request), WorkerId(asked.worker), asked.via)

    async def profile(asked: Profile) -> Profiled:
        return await parts.boundaries.measure() if asked.measure else parts.boundaries.report()

    async def drain(asked: Drain) -> Drained:
        return await parts.drains.drain(WorkerId(asked.worker), asked.wait, asked.deadline_s)

    async def resume(asked: Resume) -> Resumed:
        return await parts.drains.resume(WorkerId(asked.worker))

    return {
        "migrate": Operation(Migrate, migrate),
        "profile": Operation(Profile, profile),
        "drain": Operation(Drain, drain),
        "resume": Operation(Resume, resume),
    }


def log_decisions(parts: Parts, path: str) -> Callable[[], None]:
    """Write the decision log from now on, until what is returned is called."""
    driver, watch = parts.driver, parts.watch

    def warn(what: str) -> None:
        log.warning("%s", what)
        watch.lasting_warnings.append(what)

    header = header_record(driver.policy, driver.scheduler.settings, time.monotonic(), time.time(), __version__)
    file = DecisionLogFile(Path(path), header, warn)
    driver.taps.append(lambda event, commands: file.take(event, commands, driver.ways_of(commands)))
    return file.close
