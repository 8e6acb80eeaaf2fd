"""A real driver, planner, executor and fleet without workers: what would be written to them is kept."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from melld.driver.driver import Driver, Tap
from melld.driver.executor import Executor
from melld.driver.report import MoveMeters
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Slot
from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.migrate import messages as say
from melld.migrate.boundaries import Boundaries, Prefill
from melld.migrate.planner import Planner, PlannerSettings
from melld.migrate.snapshot import Phase, Via
from melld.migrate.wish import Cause
from melld.scheduler import events
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.state import RequestState
from tests.engine.fleet.virtual_worker import VirtualHost

BLOCK_BYTES, BLOCK_TOKENS, BLOCKS = 1000, 16, 100
TIGHT = Boundaries(epoch_s=0.1, other_link_bytes=5000, other_prefill=Prefill(40, 30))
W0, W1, W2 = (WorkerId(name) for name in ("w0", "w1", "w2"))


class OfflineFleet(Fleet):
    """A fleet whose workers become ready on demand, and whose wires end here."""

    def __init__(self, driver: Any, clock: Any) -> None:
        self.slots = {
            name: Slot(worker=name, device=f"cpu:{index}", spec=WorkerSpec(
                worker=name, model_path="", device_kind="cpu"
            ))
            for index, name in enumerate((W0, W1, W2))
        }  # fmt: skip
        codec: Any = SimpleNamespace(encode_request=lambda _request: b"")
        super().__init__(list(self.slots.values()), VirtualHost(), codec, driver, clock)
        self.sent: list[tuple[WorkerId, Any]] = []

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Any = ()) -> None:
        self.sent.append((worker, message))

    def is_ready(self, worker: WorkerId) -> bool:
        return worker in self.workers


class OfflineDaemon:
    """Three workers that share their memory, a driver that places one by one, and the test's clock."""

    def __init__(
        self,
        boundaries: Boundaries = TIGHT,
        policy: str = "most-free",
        fleet: type[OfflineFleet] = OfflineFleet,
        taps: Sequence[Tap] = (),
    ) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(POLICIES[policy], SchedulerSettings())
        self.planner = Planner(boundaries, PlannerSettings(give_up=20))
        self.fleet = fleet(lambda: self.driver, self.clock)
        self.executor = Executor(self.fleet, self.clock, MoveMeters(CollectorRegistry()))
        self.driver = Driver(self.scheduler, self.fleet, self.executor, self.planner, taps, self.clock, 0.1)
        for name in (W0, W1, W2):
            self.up(name)
        for destination, message in self.fleet.sent:
            if isinstance(message, wire.OpenLink):
                opened = wire.LinkOpened(peer=message.peer, transport="shared_memory", bytes_per_s=5e4)
                self.fleet.worker_said(self.fleet.slots[destination], opened, [])

    def clock(self) -> float:
        return self.now_s

    def up(self, name: WorkerId, kv_failure: str = "") -> None:
        ready = wire.WorkerReady(
            total_blocks=BLOCKS, geometry=KvGeometry(BLOCK_TOKENS, BLOCK_BYTES),
            max_requests=8, supported_tasks=["generate"], load_s=0.0, ready_response=b"",
            kv_handle=b"" if kv_failure else b"memory", kv_failure=kv_failure,
        )  # fmt: skip
        self.fleet.worker_said(self.fleet.slots[name], ready, [])

    def admit(self, name: str, blocks: int) -> RequestId:
        """Add a request that has come this far on the worker that it was given to."""
        tokens = blocks * BLOCK_TOKENS - 1
        self.fleet.requests.admit(SimpleNamespace(
            request_id=name, prompt_token_ids=[1] * tokens, prompt_embeds=None, pooling_params=None, priority=0,
            cache_salt=None,
        ))  # fmt: skip
        request = RequestId(name)
        worker = self.fleet.live[request].worker
        assert worker is not None
        facts = {request: (blocks, Phase.DECODING)}
        self.fleet.ledger.blocks_changed(worker, (blocks, BLOCKS, 0), facts)
        return request

    def where(self, request: RequestId) -> WorkerId:
        worker = self.fleet.live[request].worker
        assert worker is not None
        return worker

    def ask(self, request: RequestId, destination: WorkerId, via: Via | None = None) -> "asyncio.Task[Any]":
        return asyncio.get_running_loop().create_task(self.driver.migrate(request, destination, via))

    def begun(self) -> dict[str, WorkerId]:
        """Return which worker was asked to describe which request: the first message of every migration."""
        return {one.request: to for to, one in self.fleet.sent if isinstance(one, say.DescribeRequest)}

    def refuse(self, request: RequestId) -> None:
        """Have the source say that it cannot."""
        told = [(to, one) for to, one in self.fleet.sent if isinstance(one, say.DescribeRequest)]
        worker, command = next((to, one) for to, one in told if one.request == request)
        failed = say.CommandFailed(move=command.move, number=command.number, request=request, reason="it will not")
        self.fleet.worker_said(self.fleet.slots[worker], failed, [])

    def epoch(self) -> None:
        self.now_s += 0.1
        self.driver.handle(events.EpochStarted(self.now_s))

    def state(self, request: RequestId) -> RequestState:
        return self.scheduler.cluster.requests[request].state

    def causes(self) -> dict[str, Cause]:
        return {deferred.request: deferred.waits_for for deferred in self.driver.wanted.planner.waiting.values()}
