"""Requests without room: the fleet and its driver, with a worker in name only.

With real workers a prompt that no worker could ever hold cannot come this far: vLLM fits the model's context to the KV
cache when a worker starts, and the API refuses what is longer.  What the scheduler says of such a request all the same,
and what the client is told, is shown here on the same objects.
"""

import json
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from melld.driver.driver import Driver
from melld.driver.executor import Executor
from melld.driver.report import MoveMeters
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError, QueueFull, RequestTooLarge, WaitedTooLong
from melld.ids import RequestId
from melld.migrate.boundaries import Boundaries
from melld.migrate.planner import Planner
from melld.scheduler import events
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.fit import BestFit
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from tests.engine.fleet.test_order import READY, SLOT, Asked, PlainCodec
from tests.engine.fleet.virtual_worker import VirtualHost
from tests.forked import run_python
from tests.scheduler.law import check_cluster

# As it comes out of vLLM's serving classes, in a process that may import them.
ANSWER = """
import json, sys
from melld.api.error_mapping import answer_to
from melld.errors import RequestTooLarge
from vllm.v1.engine.exceptions import EngineGenerateError
error = EngineGenerateError()
error.__cause__ = RequestTooLarge("huge", int(sys.argv[1]), int(sys.argv[2]))
answer = answer_to(error, frozenset({"messages", "model"}))
print(json.dumps([answer.status, answer.code, answer.param]))
"""
FULL = tuple(range(100))  # 101 tokens are 7 of the worker's 8 blocks


class World:
    """A fleet of one worker and its driver, with the test's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        settings = SchedulerSettings(ClusterSettings(retire_after_s=60.0), max_waiting=2, wait_deadline_s=5.0)
        self.scheduler = Scheduler(BestFit, settings)
        self.fleet = Fleet([SLOT], VirtualHost(), PlainCodec(), lambda: self.driver, self.clock)
        executor = Executor(self.fleet, self.clock, MoveMeters(CollectorRegistry()))
        self.driver = Driver(self.scheduler, self.fleet, executor, Planner(Boundaries()), (), self.clock, 0.1)
        self.fleet.worker_said(SLOT, READY, [])

    def clock(self) -> float:
        return self.now_s

    def failed(self) -> dict[RequestId, MelldError]:
        """Return the requests that have failed since the last call."""
        return dict(self.fleet.requests.failures.get_nowait() for _ in range(self.fleet.requests.failures.qsize()))

    def admit(self, name: str, prompt: tuple[int, ...] = FULL, client: str = "") -> None:
        self.fleet.requests.admit(Asked(request_id=name, prompt_token_ids=prompt), client)

    def epoch(self, at_s: float) -> None:
        self.now_s = at_s
        self.driver.handle(events.EpochStarted(at_s))


@pytest.fixture
def world() -> Iterator[World]:
    """After each test the books agree."""
    world = World()
    yield world
    check_cluster(world.scheduler.cluster)
    assert set(world.fleet.live) == set(world.scheduler.cluster.requests)


def test_a_prompt_that_fits_no_worker_is_refused_and_forgotten(world: World) -> None:
    """At once, as a client error, and it holds nothing."""
    with pytest.raises(RequestTooLarge) as refused:
        world.admit("huge", tuple(range(200)))
    assert not world.fleet.live
    error = refused.value
    done = run_python("-c", ANSWER, str(error.kv_bytes), str(error.capacity_bytes))
    assert json.loads(done.stdout.splitlines()[-1]) == [400, "request_too_large", "messages"]


def test_a_request_that_would_fit_an_empty_worker_waits(world: World) -> None:
    """Memory that others hold for now is no reason to refuse."""
    world.driver.handle(events.WorkerCapacityChanged(0.0, worker=SLOT.worker, capacity_bytes=64))
    world.admit("later")
    assert world.fleet.live[RequestId("later")].worker is None
    world.driver.handle(events.WorkerCapacityChanged(0.0, worker=SLOT.worker, capacity_bytes=512))
    assert world.fleet.live[RequestId("later")].worker == SLOT.worker


def test_a_request_beyond_the_queue_s_limit_is_never_kept(world: World) -> None:
    """The caller gets the error instead of a stream: nothing is left to clean up."""
    for name in ("runs", "waits", "waits too"):
        world.admit(name)
    with pytest.raises(QueueFull) as refused:
        world.admit("one too many")
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert (refused.value.retry_after_s or 0) >= 1
    assert not world.failed()


def test_a_greedy_client_s_request_is_shed_and_told(world: World) -> None:
    """A request that had been queued gets the error where its tokens would have come."""
    world.admit("runs", client="key0")
    for name in ("waits", "waits too"):
        world.admit(name, client="key0")
    world.admit("another's", client="key1")
    assert {name: type(error) for name, error in world.failed().items()} == {"waits too": QueueFull}
    world.fleet.requests.abort(["runs"])
    assert world.fleet.live[RequestId("another's")].worker == SLOT.worker, "served before the one who had its turn"


def test_a_request_that_has_begun_is_never_shed(world: World) -> None:
    """A worker's death returns streams to the queue; there they stay until there is room."""
    world.admit("begun")
    world.driver.handle(events.WorkerDown(0.0, worker=SLOT.worker))
    world.fleet.live[RequestId("begun")].worker = None
    world.admit("waits")
    for at_s in (4.9, 5.0, 500.0):
        world.epoch(at_s)
    failed = world.failed()
    assert {name: type(error) for name, error in failed.items()} == {"waits": WaitedTooLong}
    assert failed[RequestId("waits")].status == 503


def test_retry_after_reflects_the_queue(world: World) -> None:
    """A client that waits as long as it is told finds room, rather than the same answer."""
    world.admit("runs")
    world.admit("waits", FULL[:40])
    world.now_s = 4.0
    world.fleet.requests.abort(["runs"])
    assert world.driver.queue.retry_after_s == pytest.approx(4.0)
