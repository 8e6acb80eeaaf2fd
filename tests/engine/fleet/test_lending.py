"""Granules lent to workers and returned: each answer reaches its owner, and nothing is free while it is read."""

import asyncio
from typing import Any

import pytest

from melld.engine.fleet.lending import Lending, TakeFailed
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.ids import EventId, WorkerId

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


class Owner:
    """The lender: records what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.gone: list[WorkerId] = []

    def wanted(self, worker: WorkerId) -> None: ...
    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None: ...
    def worker_ended(self, worker: WorkerId, ended: WorkerEnded) -> None: ...

    def worker_gone(self, worker: WorkerId) -> None:
        self.gone.append(worker)
        self.heard.append(worker)

    def returned(self, worker: WorkerId, answer: wire.GranulesReturned) -> None:
        self.heard.append((worker, answer.granules))


def returned(take: int, *granules: int) -> wire.GranulesReturned:
    return wire.GranulesReturned(take=take, granules=granules)


async def test_each_take_gets_its_own_answer() -> None:
    """Two takes from one worker are not mixed up, and name the event that made them."""
    told, owner = asyncio.Queue[Any](), Owner()
    lending = Lending(lambda worker, message: told.put_nowait((worker, message)), owner)
    takes = [asyncio.ensure_future(lending.take(W0, count, 1.0, EventId(7))) for count in (1, 2)]
    first, second = [await told.get() for _ in takes]
    assert (first, second) == (
        (W0, wire.TakeGranules(1, 1, 1.0, EventId(7))),
        (W0, wire.TakeGranules(2, 2, 1.0, EventId(7))),
    )
    lending.returned(W0, returned(2, 5, 6))
    await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
    assert [take.done() for take in takes] == [False, True]
    lending.returned(W0, returned(1, 4))
    await asyncio.gather(*takes)
    assert owner.heard == [(W0, (5, 6)), (W0, (4,))]


async def test_returned_granules_are_known_before_the_worker_s_end() -> None:
    """Else they would be freed again with the rest, when they are another's already."""
    owner = Owner()
    lending = Lending(lambda _worker, _message: None, owner)
    take = asyncio.ensure_future(lending.take(W0, 1, 1.0))
    await asyncio.sleep(0)
    lending.returned(W0, returned(1, 3))
    lending.worker_ended(W0, [])
    assert owner.heard == [(W0, (3,)), W0]
    await take


async def test_a_late_answer_still_returns_its_granules() -> None:
    """No granule is lost because the worker was slow."""
    owner = Owner()
    lending = Lending(lambda _worker, _message: None, owner)
    with pytest.raises(TakeFailed, match="w0 did not give back KV memory: no reply for 0 s"):
        await lending.take(W0, 1, -1.0)
    lending.returned(W0, returned(1, 3))
    assert owner.heard == [(W0, (3,))]


async def test_a_worker_that_ends_fails_only_its_own_takes() -> None:
    """Whoever waits for a dead worker's granules looks elsewhere at once."""
    lending = Lending(lambda _worker, _message: None)
    lost, other = (asyncio.ensure_future(lending.take(worker, 1, 10.0)) for worker in (W0, W1))
    await asyncio.sleep(0)
    lending.worker_ended(W0, [])
    with pytest.raises(TakeFailed, match="w0 exited before it replied"):
        await lost
    lending.returned(W1, returned(2, 9))
    await other


def test_a_dead_worker_s_memory_is_freed_once_no_sibling_reads_it() -> None:
    """Another model's data must not end up in a request that was moving away when its worker died."""
    owner = Owner()
    lending = Lending(lambda _worker, _message: None, owner)
    lending.worker_ended(W0, [W1, W2])
    lending.link_closed(W1, W0)
    assert owner.gone == []
    lending.worker_ended(W2, [W1])  # what has ended reads nothing
    assert owner.gone == [W0]
    lending.link_closed(W1, W2)
    assert owner.gone == [W0, W2]
    lending.worker_ended(W1, [])
    assert owner.gone == [W0, W2, W1]
