"""The daemon's status, and whether it serves.

Owns the readings of devices and the token rates, taken once a second.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable

import msgspec

from melld import __version__
from melld.control.status import (
    SERVING,
    DaemonState,
    DaemonStatus,
    RequestStatus,
    ServiceStatus,
    WorkerState,
    WorkerStatus,
)
from melld.daemon.history import History
from melld.daemon.why import Why
from melld.driver.boundaries import BoundaryKeeper
from melld.driver.drain import DrainState, WorkerDrain
from melld.driver.driver import Driver
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Place
from melld.engine.fleet.request import Live
from melld.engine.pin import VLLM_VERSION
from melld.ids import WorkerId
from melld.kvstore.capacity import CapacityRule
from melld.kvstore.device_poller import DevicePoller
from melld.kvstore.device_reading import DeviceReading, DeviceState
from melld.kvstore.nvml import Nvml
from melld.kvstore.process_meter import ProcessMeter
from melld.migrate.snapshot import Phase

RATE_WINDOW = 5
"""Readings, a second apart, that `tokens_per_s` looks back over."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that do not change while the daemon runs."""

    pid: int
    models: tuple[str, ...]
    policy: str
    url: str
    started_s: float
    async_scheduling: str = ""


class Condition(msgspec.Struct):
    """The daemon's state and its warnings."""

    state: DaemonState = DaemonState.STARTING
    reload_warnings: list[str] = []
    """Cleared by the next successful reload."""
    warnings: list[str] = []


class Watch:
    """Builds the daemon's status."""

    def __init__(
        self,
        fleet: Fleet,
        driver: Driver,
        history: History,
        why: Why,
        boundaries: BoundaryKeeper,
        identity: Identity,
        condition: Condition,
        nvml: Nvml | None,
    ) -> None:
        self._fleet = fleet
        self._driver = driver
        self._history = history
        self._why = why
        self._boundaries = boundaries
        self._identity = identity
        self._condition = condition
        self._nvml = nvml
        self._poller = DevicePoller({})
        self._metered: dict[str, int] = {}
        self._capacities: dict[WorkerId, CapacityRule] = {}
        self._readings: dict[str, DeviceReading] = {}
        self._tokens: dict[str, deque[tuple[float, int]]] = {}

    async def run(self) -> None:
        """Read the devices and the rates once a second, until cancelled."""
        while True:
            self._set_sources()
            self._readings = await self._poller.read()
            self._follow_capacities()
            now_s = time.monotonic()
            for worker, facts in self._fleet.workers.items():
                seen = self._tokens.setdefault(worker, deque(maxlen=RATE_WINDOW + 1))
                if seen and facts.tokens < seen[-1][1]:
                    seen.clear()  # a new process, which counts from 0
                seen.append((now_s, facts.tokens))
            await asyncio.sleep(1.0)

    def _set_sources(self) -> None:
        for place in self._fleet.places.values():
            pid = place.process.pid if place.process is not None else 0
            if not pid or self._metered.get(place.slot.device) == pid:
                continue
            self._metered[place.slot.device] = pid
            if place.slot.uuid is None:
                self._readings.pop(place.slot.device, None)  # it belongs to the process before
            self._capacities.pop(place.slot.worker, None)
            self._poller.set_source(place.slot.device, self._reader(place, pid))

    def _reader(self, place: Place, pid: int) -> Callable[[], DeviceReading]:
        device, uuid, nvml = place.slot.device, place.slot.uuid, self._nvml
        if uuid is None or nvml is None:
            return ProcessMeter(device, pid).read
        return lambda: nvml.read(device, uuid, *self._pids(uuid))

    def _pids(self, uuid: str) -> tuple[list[int], list[int]]:
        """Return the pids of the workers on that device, and of all other workers: none of them counts as foreign."""
        own: list[int] = []
        guests: list[int] = []
        for place in self._fleet.places.values():
            if place.process is not None and place.process.pid:
                (own if place.slot.uuid == uuid else guests).append(place.process.pid)
        return own, guests

    def _follow_capacities(self) -> None:
        """Adjust GPU workers' capacities to the memory that other programs hold; CPU devices have no such limit."""
        for place in self._fleet.places.values():
            worker, reading = place.slot.worker, self._readings.get(place.slot.device)
            blocks = self._fleet.ledger.worker(worker)
            if blocks is None or reading is None or place.slot.uuid is None or not self._fleet.is_ready(worker):
                continue
            rule = self._capacities.get(worker)
            if rule is None:
                rule = self._capacities[worker] = CapacityRule(blocks.capacity_bytes, blocks.geometry.block_bytes)
            if (capacity_bytes := rule.seen(reading)) is not None:
                self._fleet.limit_capacity(worker, capacity_bytes)

    # -- readiness --------------------------------------------------------------------------------------------------

    def why_not_ready(self) -> str | None:
        """Say in a few words why a request would not be served now; return None if it would."""
        return self._why_not(lambda _place, state: state in SERVING)

    def why_closed(self) -> str | None:
        """Say why requests may not even wait: no worker will be restarted; return None if they may."""
        return self._why_not(
            lambda place, state: state not in (WorkerState.DRAINING, WorkerState.DRAINED) and not place.given_up
        )

    def _why_not(self, holds: Callable[[Place, WorkerState], bool]) -> str | None:
        if self._condition.state is not DaemonState.READY:
            return self._condition.state.value
        states = [(place, self._state(place)[0]) for place in self._fleet.places.values()]
        if any(holds(place, state) for place, state in states):
            return None
        return "no worker can serve: " + ", ".join(f"{place.slot.worker} {state}" for place, state in states)

    def _state(self, place: Place) -> tuple[WorkerState, str]:
        return _state_of(place, self._driver.drains.by_worker.get(place.slot.worker))

    # -- status -----------------------------------------------------------------------------------------------------

    def status(self) -> DaemonStatus:
        """Return the present status."""
        now_s = time.monotonic()
        live = self._fleet.live.values()
        placed = [request for request in live if request.worker is not None]
        queued = [request for request in live if request.worker is None]
        seconds = self._history.worker_seconds()
        return DaemonStatus(
            melld_version=__version__,
            vllm_version=VLLM_VERSION,
            pid=self._identity.pid,
            model=self._identity.models[0],
            models=self._identity.models,
            state=self._condition.state,
            uptime_s=round(now_s - self._identity.started_s, 3),
            url=self._identity.url,
            policy=self._identity.policy,
            boundaries=self._boundaries.line(),
            links=self._why.links(),
            async_scheduling=self._identity.async_scheduling,
            queued_requests=len(queued),
            warnings=(*self._condition.reload_warnings, *self._condition.warnings),
            preemptions=self._driver.preemptions,
            worker_seconds_awake=round(seconds.awake, 3),
            gpu_hours_saved=round((seconds.known - seconds.awake) / 3600, 6),
            service=self._service(),
            moves=self._why.moves(),
            workers=tuple(self._worker(place) for place in self._fleet.places.values()),
            requests=tuple(self._request(request, now_s) for request in [*placed, *queued]),
        )

    def _service(self) -> ServiceStatus:
        attainment = self._history.attainment
        judged, itl_s = attainment.judged, attainment.itl_target_s
        return ServiceStatus(
            itl_target_ms=None if itl_s is None else round(itl_s * 1e3, 3),
            ttft_target_s=attainment.ttft_target_s,
            requests=judged,
            attainment=round(attainment.attained / judged, 4) if judged else None,
            ttft_attainment=round(attainment.in_time / judged, 4) if judged else None,
            itl_attainment=round(attainment.in_pace / judged, 4) if judged else None,
        )

    def _worker(self, place: Place) -> WorkerStatus:
        worker = place.slot.worker
        facts = self._fleet.workers.get(worker)
        blocks = self._fleet.ledger.worker(worker)
        reading = self._reading(place)
        phases = [holding.phase for holding in self._fleet.ledger.holdings_on(worker)] if blocks else []
        state, reason = self._state(place)
        if not reason and reading is not None and reading.state is not DeviceState.OK:
            reason = f"device {reading.state}: {reading.reason}"
        return WorkerStatus(
            worker=worker,
            device=place.slot.device,
            device_name=reading.name if reading else None,
            state=state,
            reason=reason,
            pid=place.process.pid if place.process is not None else None,
            capacity_bytes=blocks.capacity_bytes if blocks else 0,
            used_bytes=blocks.used_bytes if blocks else 0,
            total_blocks=blocks.total_blocks if blocks else 0,
            used_blocks=blocks.used_blocks if blocks else 0,
            reserved_blocks=blocks.reserved_blocks if blocks else 0,
            running_requests=sum(phase is not Phase.WAITING for phase in phases),
            waiting_requests=sum(phase is Phase.WAITING for phase in phases),
            max_requests=facts.max_requests if facts else 0,
            tokens_per_s=self._tokens_per_s(worker),
            step_ms=round(statistics.median(facts.step_s) * 1e3, 3) if facts and facts.step_s else None,
            memory_bytes=reading.used_bytes if reading else None,
            memory_total_bytes=reading.total_bytes if reading else None,
            power_w=reading.power_w if reading else None,
            temperature_c=reading.temperature_c if reading else None,
            utilisation=reading.utilisation if reading else None,
            restarts=place.restarts,
            size_class=self._why.size_class(worker),
            why=self._why.why(place),
        )

    def _reading(self, place: Place) -> DeviceReading | None:
        """Return the device's last reading.  A CPU device's reading is its process's, so an earlier one is dropped."""
        pid = place.process.pid if place.process is not None else None
        if place.slot.uuid is None and self._metered.get(place.slot.device) != pid:
            return None
        return self._readings.get(place.slot.device)

    def _tokens_per_s(self, worker: str) -> float:
        seen = self._tokens.get(worker)
        if seen is None or len(seen) < 2 or not self._fleet.is_ready(WorkerId(worker)):
            return 0.0
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return round((last - first) / (last_s - first_s), 1)

    def _request(self, live: Live, now_s: float) -> RequestStatus:
        holding = self._fleet.ledger.holding(live.request, live.worker) if live.worker is not None else None
        migration = self._driver.migration_of(live.request)
        return RequestStatus(
            moves=live.moves,
            pinned=self._driver.is_pinned(live.request),
            moving_to=migration.wish.destination if migration is not None else None,
            moving_step=migration.state if migration is not None else None,
            request=live.request,
            worker=live.worker,
            phase=Phase(holding.phase) if holding else Phase.WAITING,
            prompt_tokens=live.prompt_tokens,
            output_tokens=len(live.output_token_ids),
            kv_bytes=holding.kv_bytes if holding else 0,
            blocks=holding.blocks if holding else 0,
            age_s=round(now_s - live.arrived_s, 3),
        )


def _state_of(place: Place, drain: WorkerDrain | None) -> tuple[WorkerState, str]:
    if drain is not None:
        return (WorkerState.DRAINED if drain.state is DrainState.DRAINED else WorkerState.DRAINING), drain.stuck
    if place.state is WorkerState.FAILED and not place.given_up:
        return place.state, f"{place.detail}; starts again in {place.back_off_s:.0f} s"
    return place.state, place.detail
