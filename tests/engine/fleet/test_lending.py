"""Granules lent to workers and returned: each answer reaches its owner, and nothing is free while it is read."""

import asyncio
from typing import Any

from melld.engine.fleet.lending import Lending
from melld.engine.fleet.owner import Owner
from melld.engine.wire import messages as wire
from melld.ids import EventId, WorkerId
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


class Lender(Owner):
    """The lender: records what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.gone: list[WorkerId] = []

    def worker_gone(self, worker: WorkerId) -> None:
        self.gone.append(worker)
        self.heard.append(worker)

    def returned(self, worker: WorkerId, answer: wire.GranulesReturned) -> None:
        self.heard.append((worker, answer.granules))


def returned(take: int, *granules: int) -> wire.GranulesReturned:
    return wire.GranulesReturned(take=take, granules=granules)


async def test_a_take_names_the_event_that_made_it() -> None:
    """The owner hears of the answer, whichever take it is to."""
    told: list[Any] = []
    owner = Lender()
    lending = Lending(lambda worker, message: told.append((worker, message)), lambda: owner)
    lending.take(W0, 1, 1.0, EventId(7))
    lending.take(W1, 2, 1.0, EventId(8))
    assert told == [(W0, wire.TakeGranules(1, 1, 1.0, EventId(7))), (W1, wire.TakeGranules(2, 2, 1.0, EventId(8)))]
    lending.returned(W1, returned(2, 5, 6))
    lending.returned(W0, returned(1, 4))
    assert owner.heard == [(W1, (5, 6)), (W0, (4,))]


async def test_returned_granules_are_known_before_the_worker_s_end() -> None:
    """Else they would be freed again with the rest, when they are another's already."""
    owner = Lender()
    lending = Lending(lambda _worker, _message: None, lambda: owner)
    lending.take(W0, 1, 1.0)
    lending.returned(W0, returned(1, 3))
    lending.worker_ended(W0, [])
    assert owner.heard == [(W0, (3,)), W0]


def test_a_late_answer_still_returns_its_granules() -> None:
    """The owner looks elsewhere meanwhile, and no granule is lost because the worker was slow."""
    owner = Lender()
    lending = Lending(lambda _worker, _message: None, lambda: owner)

    async def wait(_loop: VirtualLoop) -> None:
        lending.take(W0, 1, 1.0)
        await asyncio.sleep(5.0)
        assert owner.heard == [(W0, ())]
        lending.returned(W0, returned(1, 3))
        assert owner.heard == [(W0, ()), (W0, (3,))]

    run_virtually(wait)


async def test_a_worker_that_ends_fails_only_its_own_take() -> None:
    """Whoever waits for a dead worker's granules looks elsewhere at once."""
    owner = Lender()
    lending = Lending(lambda _worker, _message: None, lambda: owner)
    lending.take(W0, 1, 10.0)
    lending.take(W1, 1, 10.0)
    lending.worker_ended(W0, [])
    assert owner.heard == [(W0, ()), W0]
    lending.returned(W1, returned(2, 9))
    assert owner.heard[2:] == [(W1, (9,))]


def test_a_dead_worker_s_memory_is_freed_once_no_sibling_reads_it() -> None:
    """Another model's data must not end up in a request that was moving away when its worker died."""
    owner = Lender()
    lending = Lending(lambda _worker, _message: None, lambda: owner)
    lending.worker_ended(W0, [W1, W2])
    lending.link_closed(W1, W0)
    assert owner.gone == []
    lending.worker_ended(W2, [W1])  # what has ended reads nothing
    assert owner.gone == [W0]
    lending.link_closed(W1, W2)
    assert owner.gone == [W0, W2]
    lending.worker_ended(W1, [])
    assert owner.gone == [W0, W2, W1]
