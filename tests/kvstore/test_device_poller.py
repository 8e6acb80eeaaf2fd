"""The poller's promises to the event loop (test_nvml covers hanging GPUs, through the driver's library)."""

import asyncio
import os
import queue
import threading

import pytest

from melld.kvstore.device_poller import DevicePoller
from melld.kvstore.device_reading import DeviceReading, DeviceState
from melld.kvstore.worker_readings import WorkerDevices, WorkerReadings
from tests.patience import PATIENCE_S

OK = DeviceReading(state=DeviceState.OK)


async def test_two_callers_share_one_reading() -> None:
    """The driver and `melld status` at once cost one reading, and both get it."""
    asked = []
    go = threading.Event()

    def source() -> DeviceReading:
        asked.append(1)
        go.wait(PATIENCE_S)
        return OK

    poller = DevicePoller({"cpu:0": source}, deadline_s=PATIENCE_S)
    both = asyncio.gather(poller.read(), poller.read())
    asyncio.get_running_loop().call_soon(go.set)
    assert await both == [{"cpu:0": OK}, {"cpu:0": OK}]
    assert len(asked) == 1


async def test_a_bug_in_a_source_is_one_unavailable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in one reading is reported, and takes down neither the poller nor the other devices."""
    reported: queue.SimpleQueue[threading.ExceptHookArgs] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", reported.put)

    def broken() -> DeviceReading:
        raise ZeroDivisionError

    poller = DevicePoller({"cuda:0": broken, "cpu:0": lambda: OK})
    readings = await poller.read()
    assert readings["cuda:0"].state is DeviceState.UNAVAILABLE
    assert readings["cpu:0"] == OK
    assert (await asyncio.to_thread(reported.get, timeout=PATIENCE_S)).exc_type is ZeroDivisionError
    assert (await poller.read())["cuda:0"].state is DeviceState.UNAVAILABLE, "it is asked again"


async def test_one_thread_asks_one_device_and_ends_with_it() -> None:
    """Starting a thread on busy cores blocks the event loop, and a thread that stays too long holds memory."""
    threads = []

    def source() -> DeviceReading:
        threads.append(threading.current_thread())
        return OK

    poller = DevicePoller({"cpu:0": source})
    for _ in range(3):
        await poller.read()
    assert len(threads) == 3
    [thread] = set(threads)
    poller.set_source("cpu:0", lambda: OK)
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive()


async def test_a_source_may_change_between_calls() -> None:
    """A restarted worker is another process: the next call reads its device from the new source."""
    poller = DevicePoller({})
    assert await poller.read() == {}
    poller.set_source("cpu:0", lambda: OK)
    assert await poller.read() == {"cpu:0": OK}


async def test_without_a_spare_thread_there_is_no_reading_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at its limit of threads must not end the daemon; the next reading may succeed."""
    poller = DevicePoller({"cpu:0": lambda: OK})

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        reading = (await poller.read())["cpu:0"]
    assert (reading.state, reading.reason) == (DeviceState.UNAVAILABLE, "can't start new thread")
    assert await poller.read() == {"cpu:0": OK}


async def test_nothing_is_left_of_workers_that_are_gone_for_good() -> None:
    """Models are added and removed for weeks; a worker that has only ended is still read, as its GPU may fill."""
    before = set(threading.enumerate())
    readings = WorkerReadings(None)
    mine, other = (WorkerDevices(worker, os.getpid(), ()) for worker in ("w0", "w1"))
    assert set(await readings.read([mine, other])) == {"w0", "w1"}
    assert set(await readings.read([mine])) == {"w0", "w1"}
    reading = {thread.name: thread for thread in set(threading.enumerate()) - before}
    assert set(reading) == {"read w0", "read w1"}
    readings.forget_all_but({"w0"})
    assert set(await readings.read([mine])) == {"w0"}
    await asyncio.to_thread(reading["read w1"].join, PATIENCE_S)
    assert not reading["read w1"].is_alive()
    assert reading["read w0"].is_alive()
