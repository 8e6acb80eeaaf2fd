"""The daemon's status, and whether it serves.

Owns the readings of devices and the token rates, taken once a second.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from melld import __version__
from melld.control.status import DaemonState, DaemonStatus, RequestStatus, ServiceStatus, WorkerState, WorkerStatus
from melld.daemon.history import Attainment
from melld.daemon.machines import Machines
from melld.daemon.model import ServedModel
from melld.daemon.obstacles import look_for_obstacle, occupants
from melld.daemon.systemd import Beat, beat_of
from melld.daemon.town.landlord import LandlordShell
from melld.engine.fleet.place import Place
from melld.engine.fleet.request import Live
from melld.engine.pin import VLLM_VERSION
from melld.ids import WorkerId
from melld.kvstore.capacity import CapacityRule
from melld.kvstore.device_reading import DeviceReading, DeviceState
from melld.kvstore.nvml import Nvml
from melld.kvstore.worker_readings import WorkerDevices, WorkerReading, WorkerReadings
from melld.migrate.snapshot import Phase
from melld.scheduler.priorities import tier_of
from melld.tasks import Tasks

RATE_WINDOW = 5
"""Readings, a second apart, that `tokens_per_s` looks back over."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that do not change while the daemon runs."""

    pid: int
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
    tasks: Tasks = msgspec.field(default_factory=Tasks)
    renewal: str = ""
    """What becomes of a renewal, in words; empty if there is none."""


class Watch:
    """Builds the daemon's status."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        identity: Identity,
        condition: Condition,
        nvml: Nvml | None,
        landlord: LandlordShell,
        machines: Machines,
    ) -> None:
        self._models = models
        self._landlord = landlord
        self._machines = machines
        self._identity = identity
        self._condition = condition
        self._reader = WorkerReadings(nvml)
        self._readings: dict[str, WorkerReading] = {}
        self._capacities: dict[WorkerId, tuple[int, CapacityRule]] = {}
        """The rule of each worker's process."""
        self._tokens: dict[WorkerId, deque[tuple[float, int]]] = {}

    async def run(self) -> None:
        """Read the devices and the rates once a second, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(1.0)

    async def look(self) -> None:
        """Read them now."""
        self._reader.forget_all_but(known := {place.slot.worker for _, place in self._places()})
        for of_removed in (self._capacities, self._tokens):
            for worker in of_removed.keys() - known:
                del of_removed[worker]
        self._readings = await self._reader.read(list(self._local())) | self._machines.readings()
        self._follow_capacities()
        for model, place in self._places():
            if (read := self._readings.get(place.slot.worker)) is not None and place.slot.uuid is not None:
                look_for_obstacle(place, model.parts.fleet.supervisor, read.device)
        now_s = time.monotonic()
        for worker, facts in [pair for model in self._models for pair in model.parts.fleet.workers.items()]:
            seen = self._tokens.setdefault(worker, deque(maxlen=RATE_WINDOW + 1))
            if seen and facts.tokens < seen[-1][1]:
                seen.clear()  # a new process, which counts from 0
            seen.append((now_s, facts.tokens))

    def _places(self) -> Iterator[tuple[ServedModel, Place]]:
        for model in self._models:
            for place in model.parts.fleet.places.values():
                yield model, place

    def _local(self) -> Iterator[WorkerDevices]:
        for _, place in self._places():
            if place.process is not None and place.process.pid and not place.slot.machine:
                yield WorkerDevices(place.slot.worker, place.process.pid, place.slot.uuids)

    def _follow_capacities(self) -> None:
        """Adjust GPU workers' capacities to the memory that other programs hold; CPU devices have no such limit."""
        for model, place in self._places():
            fleet, worker, read = model.parts.fleet, place.slot.worker, self._readings.get(place.slot.worker)
            blocks, process = fleet.ledger.worker(worker), place.process
            if blocks is None or read is None or place.slot.uuid is None or not fleet.is_ready(worker):
                continue
            if not blocks.geometry.keeps_kv:
                continue
            if process is None or process.pid != read.pid:
                continue  # it was read before this process was there
            pid, rule = self._capacities.get(worker, (0, None))
            if rule is None or pid != read.pid:
                rule = CapacityRule(blocks.capacity_bytes, blocks.geometry.block_bytes)
                self._capacities[worker] = read.pid, rule
            if (capacity_bytes := rule.seen(read.device)) is not None:
                fleet.change(worker, capacity_bytes=capacity_bytes)
            if rule.gives_way and place.state is WorkerState.ASLEEP and fleet.supervisor.owner.wants_all:
                fleet.stop_worker(worker)  # what it holds is of use to nobody but the other program

    # -- readiness --------------------------------------------------------------------------------------------------

    def why_not_ready(self) -> str | None:
        """Say in a few words why no request would be served now; return None if one of the models is served."""
        return self._why_not(model.why_not_ready() for model in self._models)

    def why_closed(self) -> str | None:
        """Say why requests may not even wait: no worker will be restarted; return None if they may."""
        return self._why_not(model.why_closed() for model in self._models)

    def _why_not(self, reasons: Iterable[str | None]) -> str | None:
        if self._condition.state is not DaemonState.READY:
            return self._condition.state.value
        found = dict[str, None]()
        for reason in reasons:
            if reason is None:  # mostly the first: each call asks
                return None
            found[reason] = None
        return "; ".join(found)

    def beat(self) -> Beat:
        """Return the daemon's health."""
        return beat_of(self.status(), self.why_not_ready(), self.why_closed())

    @property
    def task_restarts(self) -> Mapping[str, int]:
        """Return how often each of the daemon's tasks was restarted after a failure."""
        return self._condition.tasks.restarts

    # -- status -----------------------------------------------------------------------------------------------------

    def status(self) -> DaemonStatus:
        """Return the current status."""
        now_s = time.monotonic()
        each = [model.parts for model in self._models]
        live = [(model, request) for model in self._models for request in model.parts.fleet.live.values()]
        queued = [pair for pair in live if pair[1].worker is None]
        placed = [pair for pair in live if pair[1].worker is not None]
        seconds = [parts.history.worker_seconds() for parts in each]
        awake_s, known_s = sum(one.awake for one in seconds), sum(one.known for one in seconds)
        return DaemonStatus(
            melld_version=__version__,
            vllm_version=VLLM_VERSION,
            pid=self._identity.pid,
            model=self._models[0].name,
            models=self._models[0].names,
            served=tuple(model.status() for model in self._models),
            devices=self._landlord.devices(),
            machines=self._machines.status(),
            state=self._condition.state,
            renewal=self._condition.renewal,
            uptime_s=round(now_s - self._identity.started_s, 3),
            url=self._identity.url,
            policy=self._identity.policy,
            roles="; ".join(dict.fromkeys(parts.why.roles() for parts in each)),
            boundaries="; ".join(dict.fromkeys(parts.driver.wanted.boundaries().in_words() for parts in each)),
            links=tuple(link for parts in each for link in parts.why.links()),
            async_scheduling=self._identity.async_scheduling,
            queued_requests=len(queued),
            warnings=(*self._condition.reload_warnings, *self._condition.warnings, *self._condition.tasks.warnings()),
            preemptions=sum(parts.driver.news.preemptions for parts in each),
            suspensions=sum(parts.driver.suspensions for parts in each),
            worker_seconds_awake=round(awake_s, 3),
            gpu_hours_saved=round((known_s - awake_s) / 3600, 6),
            service=self._service([parts.history.attainment for parts in each]),
            moves=tuple(move for parts in each for move in parts.why.moves()),
            workers=tuple(self._worker(model, place) for model, place in self._places()),
            requests=tuple(self._request(model, request, now_s) for model, request in [*placed, *queued]),
        )

    def _service(self, served: Sequence[Attainment]) -> ServiceStatus:
        """Return the first model's targets, and how many requests of all models met theirs."""
        judged, itl_s = sum(one.judged for one in served), served[0].itl_target_s
        return ServiceStatus(
            itl_target_ms=None if itl_s is None else round(itl_s * 1e3, 3),
            ttft_target_s=served[0].ttft_target_s,
            requests=judged,
            attainment=round(sum(one.attained for one in served) / judged, 4) if judged else None,
            ttft_attainment=round(sum(one.in_time for one in served) / judged, 4) if judged else None,
            itl_attainment=round(sum(one.in_pace for one in served) / judged, 4) if judged else None,
        )

    def _worker(self, model: ServedModel, place: Place) -> WorkerStatus:
        worker, fleet, why = place.slot.worker, model.parts.fleet, model.parts.why
        facts = fleet.workers.get(worker)
        page = fleet.ledger.worker(worker)
        blocks = page if page is not None and page.geometry.keeps_kv else None
        reading = self._reading(place)
        phases = [holding.phase for holding in fleet.ledger.holdings_on(worker)]
        state, reason = model.state_of(place)
        if not reason and reading is not None and reading.state is not DeviceState.OK:
            reason = f"device {reading.state}: {reading.reason}"
        _, rule = self._capacities.get(worker, (0, None))
        if not reason and reading is not None and rule is not None and rule.gives_way and fleet.is_ready(worker):
            reason = f"gives way: {occupants(reading)} of {place.slot.device}"
        return WorkerStatus(
            worker=worker,
            model=model.name,
            device=place.slot.device,
            machine=place.slot.machine,
            device_name=reading.name if reading else None,
            state=state,
            role=why.role(worker),
            reason=reason,
            pid=place.process.pid if place.process is not None else None,
            capacity_bytes=blocks.capacity_bytes if blocks else None if page else 0,
            used_bytes=blocks.used_bytes if blocks else 0,
            total_blocks=blocks.total_blocks if blocks else 0,
            used_blocks=blocks.used_blocks if blocks else 0,
            reserved_blocks=blocks.reserved_blocks if blocks else 0,
            promised_bytes=why.promised_bytes(worker),
            freeness_s=why.freeness_s(worker),
            running_requests=sum(phase is not Phase.WAITING for phase in phases),
            waiting_requests=sum(phase is Phase.WAITING for phase in phases),
            max_requests=facts.max_requests if facts else 0,
            tokens_per_s=self._tokens_per_s(worker) if fleet.is_ready(worker) else 0.0,
            step_ms=round(statistics.median(facts.step_s) * 1e3, 3) if facts and facts.step_s else None,
            memory_bytes=reading.used_bytes if reading else None,
            memory_total_bytes=reading.total_bytes if reading else None,
            power_w=reading.power_w if reading else None,
            temperature_c=reading.temperature_c if reading else None,
            utilisation=reading.utilisation if reading else None,
            restarts=place.life.restarts,
            size_class=why.size_class(worker) if blocks else None,
            why=why.why(place),
            loan=model.parts.driver.loans.status_of(worker),
        )

    def _reading(self, place: Place) -> DeviceReading | None:
        """Return the device's last reading.  A CPU device's reading is its process's, so an earlier one is dropped."""
        read, pid = self._readings.get(place.slot.worker), place.process.pid if place.process is not None else None
        return None if read is None or (place.slot.uuid is None and read.pid != pid) else read.device

    def _tokens_per_s(self, worker: WorkerId) -> float:
        seen = self._tokens.get(worker)
        if seen is None or len(seen) < 2:
            return 0.0
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return round((last - first) / (last_s - first_s), 1)

    def _request(self, model: ServedModel, live: Live, now_s: float) -> RequestStatus:
        fleet, driver = model.parts.fleet, model.parts.driver
        holding = fleet.ledger.holding(live.request, live.worker) if live.worker is not None else None
        page = fleet.ledger.worker(live.worker) if live.worker is not None else None
        kv = holding if page is not None and page.geometry.keeps_kv else None
        migration = driver.migration_of(live.request)
        return RequestStatus(
            moves=live.moves,
            suspensions=live.suspensions,
            pinned=driver.is_pinned(live.request),
            moving_to=migration.wish.destination if migration is not None else None,
            moving_step=migration.state if migration is not None else None,
            request=live.request,
            model=model.name,
            worker=live.worker,
            phase=Phase(holding.phase) if holding else Phase.WAITING,
            tier=tier_of(live.priority),
            priority=live.priority,
            prompt_tokens=live.prompt_tokens,
            output_tokens=len(live.output_token_ids),
            kv_bytes=kv.kv_bytes if kv else 0,
            blocks=kv.blocks if kv else 0,
            age_s=round(now_s - live.arrived_s, 3),
        )
