"""A place for a worker: its device, its process, its state, and what the scheduler knows of it.

Owns the worker's lifecycle (`status.WorkerState` and the table below, drawn in docs/architecture.md), the offer that
the scheduler counts on, and the requests that wait for the worker to wake.  Starts and ends no process.

The scheduler keeps a worker whose process was ended or dozes on purpose and may place requests on it: they are held
here until it is ready.  Only a worker that dies, or does not wake, is taken from the scheduler.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from melld.control.status import WorkerState
from melld.engine.fleet.process import WorkerProcess
from melld.engine.wire.spec import WorkerSpec
from melld.errors import IllegalTransition
from melld.ids import RequestId, WorkerId
from melld.scheduler import events

MAX_FAILED_STARTS = 5
MAX_BACK_OFF_S = 60.0
MAX_DOUBLINGS = 6
"""Of a rest of one second, which is then longer than `MAX_BACK_OFF_S`."""


class Guard(enum.StrEnum):
    """A condition of a place's step."""

    NONE = ""
    GIVEN_UP = "given up"
    TRIED_AGAIN = "not given up"
    IN_SERVICE = "not kept out by an operator"


class Step(NamedTuple):
    """The state that an event leads to, and the guard that must hold."""

    after: WorkerState
    guard: Guard = Guard.NONE


_S = WorkerState
_ROWS: Sequence[tuple[Sequence[WorkerState], str, Step]] = (
    ([_S.STARTING, _S.WAKING], "ready", Step(_S.READY)),
    ([_S.READY], "sleep", Step(_S.ASLEEP)),
    ([_S.READY, _S.ASLEEP], "doze", Step(_S.DOZING)),
    ([_S.ASLEEP], "wake", Step(_S.READY)),
    ([_S.DOZING], "wake", Step(_S.WAKING)),
    ([_S.STARTING, _S.READY, _S.ASLEEP, _S.DOZING, _S.WAKING], "stop", Step(_S.STOPPING)),
    ([_S.STOPPING], "ended", Step(_S.STOPPED)),
    ([_S.WAKING], "ended", Step(_S.WAKING)),
    ([_S.STOPPING, _S.STOPPED], "start", Step(_S.WAKING)),
    ([_S.STOPPING, _S.STOPPED], "wake", Step(_S.WAKING, Guard.IN_SERVICE)),
    ([_S.STARTING, _S.READY, _S.ASLEEP, _S.DOZING, _S.STOPPED, _S.WAKING], "died", Step(_S.FAILED)),
    ([_S.FAILED], "retry", Step(_S.STARTING, Guard.TRIED_AGAIN)),
    ([_S.FAILED], "start", Step(_S.STARTING, Guard.GIVEN_UP)),
    ([_S.FAILED], "stop", Step(_S.STOPPED)),
)
TRANSITIONS: Mapping[tuple[WorkerState, str], Step] = {
    (state, event): step for states, event, step in _ROWS for state in states
}
"""The only table of a worker's lifecycle: its process keeps no state, and the scheduler hears of it from here."""
WARM = frozenset({WorkerState.READY, WorkerState.ASLEEP})
"""States in which a worker has its model loaded and answers at once."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed facts of a place: the worker's name, its devices, and the specification that it starts with."""

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
        """Return each of its devices by name, without the number of a worker that shares it: `cuda:0`, `cuda:1`."""
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


class Place:
    """A slot and its present worker."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.state = WorkerState.STARTING
        self.process: WorkerProcess | None = None
        self.restarts = 0
        self.failed_starts = 0
        """Deaths in a row while loading."""
        self.setbacks = 0
        """Deaths since it last ran for `steady_after_s`."""
        self.has_been_ready = False
        self.detail = ""
        self.unanswered = 0
        self.is_owned = False
        """Somebody else decides when it starts and what it offers; it is never given up."""
        self.is_left = False
        """Its owner has its requests leave: an operator's resume does not undo that."""
        self.unloaded_because = ""
        """Why its owner last had it end or doze."""
        self.obstacle = ""
        """What another program has of its device, so that it cannot start; it is not tried until that has gone."""
        self.rested_s = 0.0
        """When it may be started again after its last death."""
        self.dozing_bytes: int | None = None
        """What its dozing process holds; None until it dozes."""
        self.is_away = False
        """Its machine is lost: nothing starts it before the machine is back."""
        self.stays_out = False
        """An operator has stopped it: only an operator starts it again."""
        self.wake_s = 0.0
        """How long its last start took, from the fork to the first token; 0 before the first."""
        self.offer: Offer | None = None
        """What the scheduler counts on; None while it does not know the worker."""
        self.is_cold = False
        """The scheduler knows that the worker must wake first."""
        self.held: list[RequestId] = []
        """Requests to send once the worker is ready, in the order of placement."""

    @property
    def is_ready(self) -> bool:
        """Return whether the worker takes requests at once."""
        return self.state in WARM

    @property
    def loading(self) -> str:
        """Return what the worker does while it starts, in words; empty otherwise."""
        process, waits = self.process, self.is_ready or self.state is WorkerState.DOZING
        return "" if process is None or process.asked_to_end or waits else process.doing

    @property
    def doing(self) -> str:
        """Return what the worker does, in words."""
        return self.loading or self.state.value

    @property
    def given_up(self) -> bool:
        """Return whether it has died while loading too often to be restarted without an operator."""
        return not self.is_owned and self.state is WorkerState.FAILED and self.failed_starts >= MAX_FAILED_STARTS

    @property
    def back_off_s(self) -> float:
        """Return the seconds to wait before the next start."""
        return min(MAX_BACK_OFF_S, 2.0 ** min(max(0, self.setbacks - 1), MAX_DOUBLINGS))

    def died(self, was_ready: bool) -> None:
        """Go to FAILED and count the death.  Only deaths while loading count as failed starts."""
        self.step("died")
        self.setbacks += 1
        self.failed_starts = 0 if was_ready else self.failed_starts + 1

    def forgive(self) -> None:
        """Reset the counts of deaths: the worker has run long enough, or an operator has started it."""
        self.setbacks = self.failed_starts = 0

    def may(self, event: str) -> bool:
        """Return True if the table has the step and its guard holds."""
        step = TRANSITIONS.get((self.state, event))
        return step is not None and self._holds(step.guard)

    def step(self, event: str) -> None:
        """Go to the state that the table names.

        Raises:
            IllegalTransition: the table has no such step, or its guard does not hold.
        """
        if not self.may(event):
            raise IllegalTransition("worker", self.slot.worker, self.state, event)
        self.state = TRANSITIONS[self.state, event].after

    def _holds(self, guard: Guard) -> bool:
        match guard:
            case Guard.GIVEN_UP:
                return self.given_up
            case Guard.TRIED_AGAIN:
                return not self.given_up
            case Guard.IN_SERVICE:
                return not self.stays_out
        return True

    # -- what the scheduler knows: each method returns the events to tell it -----------------------------------------

    def announce(self, offer: Offer, now_s: float) -> list[events.AnyEvent]:
        """Note the offer of a process that has produced a token."""
        worker = self.slot.worker
        if self.offer is None:
            self.offer = offer
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
        told: list[events.AnyEvent] = [*self.resize(offer.capacity_bytes, now_s), *self.limit(offer.slots, now_s)]
        self.offer = offer
        if self.is_cold:
            self.is_cold = False
            told.append(events.WorkerWakeTimeChanged(now_s, worker=worker, wake_s=0.0))
        return told

    def introduce(self, offer: Offer, now_s: float) -> list[events.AnyEvent]:
        """Tell of an owned worker, ready or not: what it may hold at most, then nothing, until `lend` says more.

        Meanwhile it has no slots, so that nothing is placed on a promise that nobody has made.
        """
        if self.offer is not None:
            return []
        worker, self.offer = self.slot.worker, msgspec.structs.replace(offer, capacity_bytes=0)
        most, block_bytes, steady = offer.capacity_bytes, offer.block_bytes, not self.setbacks
        return [
            events.WorkerUp(now_s, worker, most, slots=0, block_bytes=block_bytes, steady=steady),
            events.WorkerCapacityChanged(now_s, worker=worker, capacity_bytes=0),
            events.WorkerSlotsChanged(now_s, worker=worker, slots=offer.slots),
        ]

    def lend(self, capacity_bytes: int, wake_s: float, now_s: float) -> list[events.AnyEvent]:
        """Note what an owned worker may hold now, and in what time it would serve."""
        if self.offer is None:
            return []
        self.is_cold = wake_s > 0.0
        woken = events.WorkerWakeTimeChanged(now_s, worker=self.slot.worker, wake_s=wake_s)
        return [woken, *self.resize(capacity_bytes, now_s)]

    def limit(self, slots: int, now_s: float) -> list[events.AnyEvent]:
        """Cap the worker at `slots` requests."""
        if self.offer is None or self.offer.slots == slots:
            return []
        self.offer = msgspec.structs.replace(self.offer, slots=slots)
        return [events.WorkerSlotsChanged(now_s, worker=self.slot.worker, slots=slots)]

    def resize(self, capacity_bytes: int, now_s: float) -> list[events.AnyEvent]:
        """Note the worker's present capacity: other programs may have taken memory of its device, or given it back."""
        if self.offer is None or self.offer.capacity_bytes == capacity_bytes:
            return []
        self.offer = msgspec.structs.replace(self.offer, capacity_bytes=capacity_bytes)
        return [events.WorkerCapacityChanged(now_s, worker=self.slot.worker, capacity_bytes=capacity_bytes)]

    def rest(self, now_s: float) -> list[events.AnyEvent]:
        """Note that the process ends on purpose.  Held requests stay held."""
        if self.offer is None or self.is_cold or self.is_owned:
            return []
        self.is_cold = True
        return [events.WorkerWakeTimeChanged(now_s, worker=self.slot.worker, wake_s=self.wake_s)]

    def leave(self, now_s: float) -> list[events.AnyEvent]:
        """Withdraw the offer of a worker that died or did not wake: its requests, held ones too, go elsewhere."""
        known, self.offer, self.is_cold, self.held = self.offer, None, False, []
        return [events.WorkerDown(now_s, worker=self.slot.worker)] if known is not None else []

    def take_held(self) -> list[RequestId]:
        """Return the held requests and hold them no longer."""
        held, self.held = self.held, []
        return held
