"""The daemon's moves between the scheduler's word and their beginning: real driver, planner, executor and fleet.

Only the workers are not there: what would be written to them is kept, and the tests answer in their place.
"""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from melld import events
from melld.driver import Driver
from melld.driver_moves import MoveCalledOff
from melld.engine import wire
from melld.engine.fleet import Fleet
from melld.engine.supervisor import Slot
from melld.ids import RequestId, WorkerId
from melld.migrate import migration_messages as say
from melld.migrate.boundaries import Boundaries
from melld.migrate.executor import Executor
from melld.migrate.executor_report import MoveMeters
from melld.migrate.planner import Cause, Planner, PlannerSettings
from melld.migrate.snapshot import Phase, Via
from melld.scheduler.scheduler import SchedulerSettings
from melld.scheduler.state import RequestState

BLOCK_BYTES, BLOCK_TOKENS, BLOCKS = 1000, 16, 100
TIGHT = Boundaries(epoch_s=0.1, other_link_bytes=5000, other_prefill=((0, 40), (1, 20)))
W0, W1, W2 = (WorkerId(name) for name in ("w0", "w1", "w2"))


class OfflineFleet(Fleet):
    """A fleet whose workers are ready when it is said so, and whose wires end here."""

    def __init__(self, clock: Any) -> None:
        self.slots = {
            name: Slot(worker=name, device=f"cpu:{index}", uuid=None, spec=wire.WorkerSpec(
                worker=name, model_path="", device_kind="cpu"
            ))
            for index, name in enumerate((W0, W1, W2))
        }  # fmt: skip
        super().__init__(list(self.slots.values()), clock)
        self.sent: list[tuple[WorkerId, Any]] = []
        self.codec = SimpleNamespace(encode_request=lambda _request: [b""])  # type: ignore[assignment]

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Any = ()) -> None:
        self.sent.append((worker, message))

    def is_ready(self, worker: WorkerId) -> bool:
        return worker in self.workers


class Daemon:
    """Three workers that share their memory, a driver that places one by one, and a clock that the test sets."""

    def __init__(self, boundaries: Boundaries = TIGHT) -> None:
        self.now_s = 0.0
        self.fleet = OfflineFleet(lambda: self.now_s)
        self.executor = Executor(self.fleet, lambda: self.now_s, MoveMeters(CollectorRegistry()))
        self.driver = Driver(self.fleet, self.executor, "most-free", lambda: self.now_s, 0.1, SchedulerSettings())
        self.driver.moves.planner = Planner(boundaries, PlannerSettings(give_up=20))
        for name in (W0, W1, W2):
            self.up(name)
        for destination, message in self.fleet.sent:
            if isinstance(message, wire.OpenLink):
                opened = wire.LinkOpened(peer=message.peer, transport="shared_memory", bytes_per_s=1e9)
                self.fleet.worker_said(self.fleet.slots[destination], opened, [])

    def up(self, name: WorkerId) -> None:
        ready = wire.WorkerReady(
            pid=1, total_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, max_model_tokens=4096,
            max_requests=8, supported_tasks=["generate"], vllm_version="", load_s=0.0, ready_response=b"",
            kv_handle=b"memory",
        )  # fmt: skip
        self.fleet.worker_said(self.fleet.slots[name], ready, [])

    def admit(self, name: str, blocks: int) -> RequestId:
        """A request that has come so far on the worker that it was given to."""
        tokens = blocks * BLOCK_TOKENS - 1
        self.fleet.admit(SimpleNamespace(
            request_id=name, prompt_token_ids=[1] * tokens, prompt_embeds=None, priority=0, cache_salt=None
        ))  # fmt: skip
        request = RequestId(name)
        worker = self.fleet.live[request].worker
        assert worker is not None
        facts = {request: (blocks, tokens, tokens, 1, Phase.DECODING)}
        self.fleet.ledger.blocks_changed(worker, 1, (blocks, BLOCKS), facts)
        return request

    def where(self, request: RequestId) -> WorkerId:
        worker = self.fleet.live[request].worker
        assert worker is not None
        return worker

    def ask(self, request: RequestId, destination: WorkerId, via: Via | None = None) -> "asyncio.Task[Any]":
        return asyncio.get_running_loop().create_task(self.driver.migrate(request, destination, via))

    def begun(self) -> dict[str, WorkerId]:
        """Who was told to describe which request: the first word of every migration."""
        return {one.request: to for to, one in self.fleet.sent if isinstance(one, say.DescribeRequest)}

    def refuse(self, request: RequestId) -> None:
        """The source says that it cannot."""
        told = [(to, one) for to, one in self.fleet.sent if isinstance(one, say.DescribeRequest)]
        worker, command = next((to, one) for to, one in told if one.request == request)
        failed = say.CommandFailed(move=command.move, number=command.number, request=request, reason="it will not")
        self.fleet.worker_said(self.fleet.slots[worker], failed, [])

    def epoch(self) -> None:
        self.now_s += 0.1
        self.driver.handle(events.EpochStarted(self.now_s))

    def state(self, request: RequestId) -> RequestState:
        return self.driver.scheduler.cluster.requests[request].state

    def causes(self) -> dict[str, Cause]:
        return {deferred.wanted.request: deferred.cause for deferred in self.driver.moves.deferred}


@pytest.fixture
async def daemon() -> Iterator[Daemon]:
    """Two requests of four blocks on one worker: its link to another carries one of them in an epoch."""
    daemon = Daemon()
    yield daemon
    daemon.driver.scheduler.cluster.check()


async def two_on_w0(daemon: Daemon) -> tuple[RequestId, RequestId]:
    """Most-free spreads: each round fills three workers."""
    names = [daemon.admit(f"r{number}", 4) for number in range(6)]
    here = [name for name in names if daemon.where(name) == W0]
    return here[0], here[1]


async def test_an_operator_s_move_begins_at_once_within_the_boundaries(daemon: Daemon) -> None:
    """`melld migrate` does not wait for an epoch where there is room."""
    first, _ = await two_on_w0(daemon)
    task = daemon.ask(first, W1)
    await asyncio.sleep(0)
    assert daemon.begun() == {first: W0}
    daemon.refuse(first)
    report = await task
    assert (report.outcome, report.reason) == ("refused", "it will not")
    assert daemon.state(first) is RequestState.RUNNING


async def test_what_a_link_cannot_take_waits_with_its_cause(daemon: Daemon) -> None:
    """An operator sees why a move does not begin, and that it does once the link is free."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    assert daemon.begun() == {first: W0}
    assert daemon.causes() == {second: Cause.LINK}
    assert daemon.driver.why_deferred(second) == "the link is taken"
    assert daemon.driver.why_deferred(first) == ""
    daemon.epoch()
    assert daemon.causes() == {second: Cause.LINK}  # the first is still on its way
    daemon.refuse(first)
    daemon.epoch()
    assert daemon.begun().keys() == {first, second}
    daemon.refuse(second)
    assert [report.outcome for report in await asyncio.gather(*tasks)] == ["refused", "refused"]


async def test_moves_without_a_wish_are_divided_between_kv_and_tokens(daemon: Daemon) -> None:
    """Two requests of one worker leave at once: one over the link, one by its tokens."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1) for name in (first, second)]
    await asyncio.sleep(0)
    assert {str(daemon.driver.moves.way_of(name)) for name in (first, second)} == {"kv", "tokens"}
    for name in (first, second):
        daemon.refuse(name)
    await asyncio.gather(*tasks)


async def test_a_request_that_ends_takes_its_waiting_move_along(daemon: Daemon) -> None:
    """The operator is told so, and the scheduler forgets it once."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    daemon.fleet.abort([second])
    with pytest.raises(MoveCalledOff, match="it has ended"):
        await tasks[1]
    assert daemon.causes() == {}
    daemon.refuse(first)
    await tasks[0]


async def test_a_worker_that_dies_takes_the_moves_to_it_along(daemon: Daemon) -> None:
    """The request stays where it is, counted there alone, and its operator hears why."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    assert daemon.state(second) is RequestState.MOVING
    daemon.fleet.withdraw(W1)
    with pytest.raises(MoveCalledOff, match="w1 has gone"):
        await tasks[1]
    assert daemon.state(second) is RequestState.RUNNING
    assert daemon.causes() == {}
    tasks[0].cancel()


async def test_a_move_that_has_waited_for_too_long_is_called_off(daemon: Daemon) -> None:
    """What was wanted for a state of things that is past is not done: the scheduler may decide anew."""
    first, second = await two_on_w0(daemon)
    tasks = [daemon.ask(name, W1, Via.KV) for name in (first, second)]
    await asyncio.sleep(0)
    for _ in range(22):
        daemon.epoch()
    with pytest.raises(MoveCalledOff, match="it has waited for 2 s: the link is taken"):
        await tasks[1]
    assert daemon.state(second) is RequestState.RUNNING
    daemon.refuse(first)
    await tasks[0]


async def test_a_worker_that_is_not_ready_is_waited_for(daemon: Daemon) -> None:
    """A move to a worker that is still waking begins when it is there, instead of failing at its deadline."""
    first, _ = await two_on_w0(daemon)
    facts = daemon.fleet.workers.pop(W1)
    task = daemon.ask(first, W1)
    await asyncio.sleep(0)
    assert daemon.causes() == {first: Cause.NO_WAY}
    daemon.fleet.workers[W1] = facts
    daemon.epoch()
    assert daemon.begun() == {first: W0}
    daemon.refuse(first)
    await task
