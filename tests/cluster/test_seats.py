"""Devices of stopped workers return to Ray, and are requested again, or others are, when a worker starts."""

import asyncio
from collections.abc import Sequence

import pytest

from melld.cluster import seats
from melld.cluster.envelopes import (
    Bytes,
    Envelope,
    Exited,
    Facts,
    Hello,
    Kill,
    ReturnSeat,
    SeatTaken,
    Spawn,
    TakeSeat,
)
from melld.cluster.link import Link
from melld.cluster.machine import Machine
from melld.cluster.seats import SeatedHost
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.device_reading import Device
from tests.patience import PATIENCE_S

SPEC = WorkerSpec(worker="w0", model_path="", device_kind="cuda", visible_devices=("GPU-a", "GPU-b"))


def gpu(uuid: str) -> Device:
    return Device(index=0, uuid=uuid)


class Wire(Link):
    """Keeps what an agent would hear, in place of a connection."""

    def __init__(self) -> None:
        super().__init__(Envelope, None, lambda _message, _payload: None, lambda _reason: None)
        self.heard: list[Envelope] = []
        self.more = asyncio.Event()

    def send(self, message: Envelope, payload: Sequence[Buffer] = ()) -> None:  # type: ignore[override]
        self.heard.append(message)
        self.more.set()

    async def next(self) -> Envelope:
        """Return the next message."""
        while not self.heard:
            self.more.clear()
            await asyncio.wait_for(self.more.wait(), PATIENCE_S)
        return self.heard.pop(0)


class Ear:
    """Notes the end."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.over = asyncio.Event()

    def forked(self, pid: int) -> None: ...

    def received(self, data: bytes) -> None: ...

    def printed(self, line: str) -> None: ...

    def exited(self, reason: str, from_outside: bool) -> None:
        self.ends.append(reason)
        self.over.set()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def host(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> SeatedHost:
    """Return the host of a worker with one GPU that is returned at once after its end."""
    monkeypatch.setattr(seats, "RETURN_S", 0.0)
    hello = Hello(token="", machine="m1", facts=Facts({}, {}), devices={0: gpu("GPU-a")})
    return SeatedHost(Machine(hello, wire, lambda _machine, _why: None), [0])


async def run_and_end(host: SeatedHost, wire: Wire) -> None:
    """Run a worker until its device has been returned."""
    ear = Ear()
    host.spawn(SPEC, ear)
    spawned = await wire.next()
    assert isinstance(spawned, Spawn)
    wire.received(Exited(spawned.number, "ended", from_outside=False), [])
    assert ear.ends == ["ended"]
    assert await wire.next() == ReturnSeat(0)


async def test_a_worker_starts_on_the_device_that_ray_gives_now(host: SeatedHost, wire: Wire) -> None:
    """Others may have taken its earlier one, which stays hidden from it."""
    await run_and_end(host, wire)
    child = host.spawn(SPEC, Ear())
    child.write([b"too early"])
    assert await wire.next() == TakeSeat(0)
    wire.received(SeatTaken(0, gpu("GPU-c")), [])
    spawned = await wire.next()
    assert isinstance(spawned, Spawn)
    assert spawned.spec.visible_devices == ("GPU-c", "GPU-b")
    child.write([b"now"])
    child.kill()
    assert [await wire.next(), await wire.next()] == [Bytes(spawned.number), Kill(spawned.number)]


async def test_a_worker_without_a_device_ends_with_the_reason(host: SeatedHost, wire: Wire) -> None:
    """Nobody is to blame, and it is retried."""
    await run_and_end(host, wire)
    ear = Ear()
    host.spawn(SPEC, ear)
    assert await wire.next() == TakeSeat(0)
    wire.received(SeatTaken(0, None, "none is free"), [])
    await asyncio.wait_for(ear.over.wait(), PATIENCE_S)
    assert ear.ends == ["machine m1 did not get a device: none is free"]


async def test_a_device_that_nobody_wants_any_more_is_returned(host: SeatedHost, wire: Wire) -> None:
    """The worker was killed while it waited; its end is reported at once, and once."""
    await run_and_end(host, wire)
    ear = Ear()
    host.spawn(SPEC, ear).kill()
    assert await wire.next() == TakeSeat(0)
    await asyncio.wait_for(ear.over.wait(), PATIENCE_S)
    assert ear.ends == ["exited before it had a device"]
    wire.received(SeatTaken(0, gpu("GPU-a")), [])
    assert await wire.next() == ReturnSeat(0)
    assert ear.ends == ["exited before it had a device"]


@pytest.mark.parametrize("turns", range(4))
async def test_a_device_that_races_with_a_kill_keeps_no_worker(host: SeatedHost, wire: Wire, turns: int) -> None:
    """However far the loop has got: nobody else would end that worker."""
    await run_and_end(host, wire)
    ear = Ear()
    child = host.spawn(SPEC, ear)
    assert await wire.next() == TakeSeat(0)
    wire.received(SeatTaken(0, gpu("GPU-a")), [])
    for _ in range(turns):
        await asyncio.sleep(0)
    child.kill()
    heard = await wire.next()
    assert heard == ReturnSeat(0) or isinstance(heard, Spawn)
    if isinstance(heard, Spawn):
        assert await wire.next() == Kill(heard.number)
    else:
        assert ear.ends == ["exited before it had a device"]


async def test_a_late_device_goes_to_the_worker_that_wants_it_now(host: SeatedHost, wire: Wire) -> None:
    """An operator drained and resumed the worker meanwhile: its device is given to nobody else."""
    await run_and_end(host, wire)
    ear = Ear()
    host.spawn(SPEC, ear).kill()
    await asyncio.wait_for(ear.over.wait(), PATIENCE_S)
    host.spawn(SPEC, Ear())
    assert await wire.next() == TakeSeat(0)
    wire.received(SeatTaken(0, gpu("GPU-a")), [])
    assert isinstance(await wire.next(), Spawn)
    for _ in range(10):  # turns of the loop: a timer of no time would have been called
        await asyncio.sleep(0)
    assert wire.heard == []


async def test_a_worker_restarted_at_once_keeps_its_device(
    host: SeatedHost, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death costs no Ray call."""
    monkeypatch.setattr(seats, "RETURN_S", 60.0)
    for _ in range(2):
        host.spawn(SPEC, Ear())
        spawned = await wire.next()
        assert isinstance(spawned, Spawn)
        wire.received(Exited(spawned.number, "ended", from_outside=False), [])
    assert wire.heard == []
