"""A place for a worker: its device, process, life cycle, and what the scheduler knows of it.

Owns the offer that the scheduler counts on, and the requests that wait for the worker to wake.  Starts and ends no
process; `life` has the table of what follows what.

The scheduler keeps a worker whose process was ended or dozes on purpose and may place requests on it: they are held
here until it is ready.  Only a worker that dies, or does not wake, is taken from the scheduler.
"""

import asyncio
from typing import Any

import msgspec

from melld.control.status import WorkerState
from melld.engine.fleet.life import WARM, State, WorkerLife
from melld.engine.fleet.process import WorkerProcess
from melld.engine.wire.spec import WorkerSpec
from melld.ids import RequestId, WorkerId
from melld.scheduler import events


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed facts of a place: the worker's name, its devices, and its start specification."""

    worker: WorkerId
    device: str
    """`cuda:0`, or `cuda:0+1` for two GPUs that make one worker."""
    uuids: tuple[str, ...] = ()
    """Of its GPUs."""
    spec: WorkerSpec
    machine: str = ""
    """Its machine in a cluster; empty: this one."""
    machine_number: int = 0
    """The same for the scheduler."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return its devices' names, without the suffix of a shared device: `cuda:0`, `cuda:1`."""
        kind, _, numbers = self.device.partition(":")
        return tuple(f"{kind}:{number.partition('.')[0]}" for number in numbers.split("+"))

    @property
    def uuid(self) -> str | None:
        """Return its first GPU; None on a CPU."""
        return self.uuids[0] if self.uuids else None


class Offer(msgspec.Struct, frozen=True):
    """A worker's offer to the scheduler."""

    capacity_bytes: int
    slots: int
    block_bytes: int
    steady: bool = True
    wake_s: float | None = None
    """In what time it would serve; None: it does."""


class Place:
    """A slot and its present worker."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.life = WorkerLife(slot.worker)
        self.process: WorkerProcess | None = None
        self.timer: asyncio.TimerHandle | None = None
        """What happens to it next unless something else does before."""
        self.detail = ""
        """Why it has failed."""
        self.unanswered = 0
        self.unloaded_because = ""
        """Why its owner last had it end or doze."""
        self.rested_s = 0.0
        """When it may be started again after a death."""
        self.dozing_bytes = 0
        """What its process held when it last dozed."""
        self.wake_s = 0.0
        """How long its last start took, from the fork to the first token; 0 before the first."""
        self.offer: Offer | None = None
        """What the scheduler counts on; None while it does not know the worker."""
        self.held: list[RequestId] = []
        """Requests to send once the worker is ready, in the order of placement."""

    @property
    def state(self) -> WorkerState:
        """Return the worker's state as others see it, drains aside."""
        match self.life.state:
            case State.STARTING if self.offer is not None:
                return WorkerState.WAKING
            case State.STOPPING if self.is_going_to_doze:
                return WorkerState.DOZING
            case State.FAILED if self.life.obstacle:
                return WorkerState.WAITING
        return WorkerState(self.life.state)

    @property
    def is_ready(self) -> bool:
        """Return True if the worker takes requests at once."""
        return self.life.state in WARM

    @property
    def is_going_to_doze(self) -> bool:
        """Return True if its process was asked to doze and has not answered."""
        return self.life.state is State.STOPPING and self.process is not None and not self.process.asked_to_end

    @property
    def loading(self) -> str:
        """Return what the worker does while it starts, in words; empty otherwise."""
        process, starts = self.process, self.life.state is State.STARTING
        return process.doing if starts and process is not None and not process.asked_to_end else ""

    @property
    def doing(self) -> str:
        """Return what the worker does, in words."""
        return self.loading or self.state.value

    # -- what the scheduler knows: each method returns the events to tell it -----------------------------------------

    def announce(self, offer: Offer, now_s: float) -> list[events.AnyEvent]:
        """Note what the worker offers from now on."""
        worker, was, self.offer = self.slot.worker, self.offer, offer
        if was is None:
            return [
                events.WorkerUp(
                    now_s,
                    worker,
                    offer.capacity_bytes,
                    offer.slots,
                    machine=self.slot.machine_number,
                    block_bytes=offer.block_bytes,
                    steady=offer.steady,
                )
            ]
        told: list[events.AnyEvent] = []
        if offer.capacity_bytes != was.capacity_bytes:
            told.append(events.WorkerCapacityChanged(now_s, worker=worker, capacity_bytes=offer.capacity_bytes))
        if offer.slots != was.slots:
            told.append(events.WorkerSlotsChanged(now_s, worker=worker, slots=offer.slots))
        if offer.wake_s != was.wake_s:
            told.append(events.WorkerWakeTimeChanged(now_s, worker=worker, wake_s=offer.wake_s or 0.0))
        return told

    def change(self, now_s: float, **changes: Any) -> list[events.AnyEvent]:
        """Note that a known worker's offer changes, by these fields."""
        return [] if self.offer is None else self.announce(msgspec.structs.replace(self.offer, **changes), now_s)

    def introduce(self, offer: Offer, now_s: float) -> list[events.AnyEvent]:
        """Report an unknown owned worker, ready or not: its maximum, then zero capacity, until that changes.

        Meanwhile it has no slots, so that nothing is placed on a promise that nobody has made.
        """
        if self.offer is not None:
            return []
        told = self.announce(msgspec.structs.replace(offer, slots=0, steady=not self.life.setbacks), now_s)
        return [*told, *self.change(now_s, capacity_bytes=0), *self.change(now_s, slots=offer.slots)]

    def leave(self, now_s: float) -> list[events.AnyEvent]:
        """Withdraw a worker that died or did not wake: its requests, including held ones, go elsewhere."""
        known, self.offer, self.held = self.offer, None, []
        return [events.WorkerDown(now_s, worker=self.slot.worker)] if known is not None else []

    def take_held(self) -> list[RequestId]:
        """Release and return the held requests."""
        held, self.held = self.held, []
        return held
