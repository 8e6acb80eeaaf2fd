"""Devices of stopped workers return to Ray, and are requested again, or others are, when a worker starts."""

import asyncio
import socket
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from melld.cluster import agent as agents
from melld.cluster import seats
from melld.cluster.agent import Agent
from melld.cluster.envelopes import Envelope, Exited, Kill, ReturnSeat, SeatAnswer, Spawn, TakeSeat
from melld.cluster.link import Link
from melld.cluster.seats import Seats
from melld.engine.host.ports import Ear
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.device_reading import Device
from tests.patience import PATIENCE_S

SPEC = WorkerSpec(worker="w0", model_path="", device_kind="cuda", visible_devices=("GPU-a", "GPU-b"), seats=(0,))


class Wire(Link):
    """Keeps what the other side would hear, in place of a connection."""

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


class Child:
    """A process of the machine; what it was told to do."""

    def __init__(self, spec: WorkerSpec, ear: Ear) -> None:
        self.spec = spec
        self.ear = ear
        self.told: list[object] = []

    def write(self, payload: Sequence[Buffer]) -> None:
        self.told.append(payload)

    def kill(self) -> None:
        self.told.append("kill")


class Site:
    """An agent whose first worker has run on seat 0, and which has returned that seat to Ray."""

    def __init__(self, end: socket.socket) -> None:
        self.agent = Agent(end)
        self.daemon, self.actor = Wire(), Wire()
        self.children: list[Child] = []
        self.agent._daemon, self.agent._parent = self.daemon, self.actor
        self.agent._template = object()  # type: ignore[assignment]
        self.agent._seats = Seats("cuda", ["a"], self.actor.send)
        self.count = 0

    def spawn(self, spec: WorkerSpec, ear: Ear) -> Child:
        self.children.append(Child(spec, ear))
        return self.children[-1]

    def ask(self) -> int:
        """Ask for a worker, as the daemon does; return its number."""
        self.count += 1
        self.agent._received(Spawn(self.count, SPEC), [])
        return self.count

    def kill(self, number: int) -> None:
        self.agent._received(Kill(number), [])

    def answer(self, gpu: str, failure: str = "") -> None:
        self.agent._parent_said(SeatAnswer(0, gpu, failure), [])

    async def run_and_end(self) -> None:
        """Run a worker to its end."""
        number = self.ask()
        self.children[-1].ear.exited("ended", False)
        assert await self.daemon.next() == Exited(number, "ended", from_outside=False)


def device(_kind: str, gpus: Sequence[str]) -> dict[int, Device]:
    """Return a GPU of that name for each seat."""
    return {seat: Device(index=0, uuid=f"GPU-{name}") for seat, name in enumerate(gpus)}


@pytest.fixture
def ends() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


@pytest.fixture
async def site(ends: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return an agent whose only seat was returned after its worker's end."""
    monkeypatch.setattr(seats, "RETURN_S", 0.0)
    monkeypatch.setattr(seats, "devices_by_seat", device)
    made = Site(ends)
    monkeypatch.setattr(agents, "LocalHost", lambda _template: made)
    await made.run_and_end()
    assert await made.actor.next() == ReturnSeat(0)
    return made


async def test_a_worker_starts_on_the_device_that_ray_gives_now(site: Site) -> None:
    """Others may have taken its earlier one, which stays hidden from it."""
    number = site.ask()
    site.agent._relays[number].write([b"too early"])
    assert await site.actor.next() == TakeSeat(0)
    site.answer("c")
    await turns(3)
    assert site.children[-1].spec.visible_devices == ("GPU-c", "GPU-b")
    site.agent._relays[number].write([b"now"])
    site.kill(number)
    assert site.children[-1].told == [[b"now"], "kill"]


async def test_a_worker_without_a_device_ends_with_the_reason(site: Site) -> None:
    """Nobody is to blame, and it is retried."""
    number = site.ask()
    assert await site.actor.next() == TakeSeat(0)
    site.answer("", "none is free")
    ended = Exited(number, "it did not get a device: none is free", from_outside=True)
    assert await site.daemon.next() == ended
    assert len(site.children) == 1


async def test_a_device_that_nobody_wants_any_more_is_returned(site: Site) -> None:
    """The worker was killed while it waited; its end is reported at once, and once."""
    site.kill(number := site.ask())
    assert await site.actor.next() == TakeSeat(0)
    assert await site.daemon.next() == Exited(number, "exited before it had a device", from_outside=True)
    site.answer("a")
    assert await site.actor.next() == ReturnSeat(0)
    await turns(5)
    assert (len(site.children), site.daemon.heard) == (1, [])


@pytest.mark.parametrize("count", range(4))
async def test_a_device_that_races_with_a_kill_keeps_no_worker(site: Site, count: int) -> None:
    """However far the loop has got: nobody else would end that worker."""
    number = site.ask()
    assert await site.actor.next() == TakeSeat(0)
    site.answer("a")
    await turns(count)
    site.kill(number)
    await turns(5)
    if len(site.children) > 1:
        assert site.children[-1].told == ["kill"]
    else:
        assert await site.actor.next() == ReturnSeat(0)
        assert await site.daemon.next() == Exited(number, "exited before it had a device", from_outside=True)


async def test_a_late_device_goes_to_the_worker_that_wants_it_now(site: Site) -> None:
    """An operator drained and resumed the worker meanwhile: its device is given to nobody else."""
    site.kill(site.ask())
    site.ask()
    assert await site.actor.next() == TakeSeat(0)
    site.answer("a")
    await turns(10)  # a timer of no time would have been called
    assert (len(site.children), site.actor.heard) == (2, [])


async def test_a_worker_restarted_at_once_keeps_its_device(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death costs no Ray call."""
    monkeypatch.setattr(seats, "RETURN_S", 60.0)
    site.ask()
    assert await site.actor.next() == TakeSeat(0)
    site.answer("a")
    await turns(3)
    site.children[-1].ear.exited("ended", False)
    await site.daemon.next()
    await site.run_and_end()
    assert site.actor.heard == []


async def test_a_worker_that_keeps_dying_keeps_its_device(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from its last end."""
    site.ask()
    assert await site.actor.next() == TakeSeat(0)
    site.answer("a")
    await turns(3)
    site.children[-1].ear.exited("ended", False)
    site.ask()
    monkeypatch.setattr(seats, "RETURN_S", 60.0)
    site.children[-1].ear.exited("ended", False)
    await turns(10)  # the timer of the first end would have been called
    assert site.actor.heard == []


async def test_a_worker_without_seats_keeps_its_devices(site: Site) -> None:
    """Unless the configuration says so, nothing is returned."""
    site.agent._received(Spawn(9, msgspec.structs.replace(SPEC, seats=())), [])
    site.children[-1].ear.exited("ended", False)
    await turns(5)
    assert (site.children[-1].spec.visible_devices, site.actor.heard) == (SPEC.visible_devices, [])


async def turns(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)
