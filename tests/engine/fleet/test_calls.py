"""Calls to workers' engines: each caller gets the answer to its own call."""

import asyncio
from typing import Any

import pytest

from melld.engine.fleet.calls import Calls
from melld.engine.fleet.process import WorkerEnded
from melld.engine.wire import messages as wire
from melld.ids import WorkerId
from tests.serve.offline_daemon import OfflineDaemon

W0, W1 = WorkerId("w0"), WorkerId("w1")


def ping(call: int) -> wire.LoadAdapter:
    return wire.LoadAdapter(call, None)


async def test_answers_reach_their_callers_in_any_order() -> None:
    """Two workers called at once are not mixed up."""
    told: asyncio.Queue[tuple[WorkerId, Any]] = asyncio.Queue()
    calls = Calls(lambda worker, message: told.put_nowait((worker, message)))
    asked = [calls.begin(worker, ping) for worker in (W0, W1)]
    for worker, message in reversed([await told.get(), await told.get()]):
        calls.answered(message.call, worker)
    assert await asyncio.gather(*asked) == [W0, W1]


async def test_a_late_answer_is_ignored() -> None:
    """The caller has given up, and the next one waits for its own answer."""
    told: list[Any] = []
    calls = Calls(lambda _worker, message: told.append(message))
    calls.begin(W0, ping).cancel()
    calls.answered(told[0].call, True)
    following = calls.begin(W0, ping)
    calls.answered(told[0].call, True)
    assert not following.done()


async def test_one_failing_worker_fails_a_call_to_all() -> None:
    """An adapter counts as loaded only where all have it."""

    def answer(worker: WorkerId, message: Any) -> None:
        error = "busy" if worker == W1 else None
        asyncio.get_running_loop().call_soon(calls.answered, message.call, True, error)

    calls = Calls(answer)
    assert await calls.begin(W0, ping)
    with pytest.raises(RuntimeError, match="busy"):
        await asyncio.gather(calls.begin(W0, ping), calls.begin(W1, ping))


async def test_a_worker_that_ends_answers_only_its_own_calls() -> None:
    """Nobody waits forever for a worker that is gone; its next process does what was asked."""
    told: list[Any] = []
    calls = Calls(lambda _worker, message: told.append(message))
    lost, other = (calls.begin(worker, ping) for worker in (W0, W1))
    calls.worker_lost(W0)
    assert await lost
    assert not other.done()
    calls.answered(told[1].call, W1)
    assert await other == W1


async def test_an_adapter_loads_though_a_worker_ends_meanwhile() -> None:
    """The next process loads it before its first request: a death during the start must not end the start."""
    fleet = OfflineDaemon().fleet
    loading = asyncio.ensure_future(fleet.load_adapter(None))
    await asyncio.sleep(0)
    asked = {worker: message for worker, message in fleet.sent if isinstance(message, wire.LoadAdapter)}
    assert set(asked) == set(fleet.slots)
    fleet.worker_ended(fleet.slots[W0], WorkerEnded(W0, "killed", expected=False))
    for worker in set(asked) - {W0}:
        fleet.calls.answered(asked[worker].call, True)
    assert await loading
