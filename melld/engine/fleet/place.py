"""A place for a worker: its device, the process that is in it now, and where that worker stands.

Owns the worker's lifecycle as the daemon sees it (`status.WorkerState`, and the table below).  Starts and ends nothing.

                      ┌─────────────────start──────────────┐
    STARTING ──ready──► READY ──sleep──► ASLEEP ──stop──► STOPPING ──ended──► STOPPED ──start──► WAKING ──ready──► READY
                          ▲ └────────────wake──┘             └──start──► WAKING (the old process ends, then a new one)
    died: FAILED ──start──► STARTING
"""

from collections.abc import Mapping

import msgspec

from melld.control.status import WorkerState
from melld.engine.fleet.process import WorkerProcess
from melld.engine.wire import messages as wire
from melld.errors import IllegalTransition
from melld.ids import WorkerId

MAX_FAILED_STARTS = 5
MAX_BACK_OFF_S = 60.0

PLACE_TRANSITIONS: Mapping[tuple[WorkerState, str], WorkerState] = {
    (WorkerState.STARTING, "ready"): WorkerState.READY,
    (WorkerState.STARTING, "stop"): WorkerState.STOPPING,
    (WorkerState.STARTING, "died"): WorkerState.FAILED,
    (WorkerState.READY, "sleep"): WorkerState.ASLEEP,
    (WorkerState.READY, "stop"): WorkerState.STOPPING,
    (WorkerState.READY, "died"): WorkerState.FAILED,
    (WorkerState.ASLEEP, "wake"): WorkerState.READY,
    (WorkerState.ASLEEP, "stop"): WorkerState.STOPPING,
    (WorkerState.ASLEEP, "died"): WorkerState.FAILED,
    (WorkerState.STOPPING, "ended"): WorkerState.STOPPED,
    (WorkerState.STOPPING, "start"): WorkerState.WAKING,
    (WorkerState.STOPPED, "start"): WorkerState.WAKING,
    (WorkerState.WAKING, "ended"): WorkerState.WAKING,
    (WorkerState.WAKING, "ready"): WorkerState.READY,
    (WorkerState.WAKING, "stop"): WorkerState.STOPPING,
    (WorkerState.WAKING, "died"): WorkerState.FAILED,
    (WorkerState.FAILED, "start"): WorkerState.STARTING,
    (WorkerState.FAILED, "stop"): WorkerState.STOPPED,
}
WARM = frozenset({WorkerState.READY, WorkerState.ASLEEP})
"""States in which a worker has its model loaded and answers at once."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place for a worker: its name, its device, and what it is told at birth."""

    worker: WorkerId
    device: str
    uuid: str | None = None
    spec: wire.WorkerSpec


class Place:
    """A slot and the process that is in it now."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.state = WorkerState.STARTING
        self.process: WorkerProcess | None = None
        self.restarts = 0
        self.failed_starts = 0
        """Deaths in a row while it was loading."""
        self.setbacks = 0
        """All deaths since it last worked for long enough."""
        self.has_been_ready = False
        self.detail = ""
        self.unanswered = 0
        self.stays_out = False
        """An operator has it stopped: it is not woken."""
        self.wake_s = 0.0
        """How long its last start took, from the fork to the first token; 0 until there has been one."""

    @property
    def is_ready(self) -> bool:
        """Whether a worker is there and takes requests at once."""
        return self.state in WARM

    @property
    def doing(self) -> str:
        """What its worker does on its way to being ready, in words."""
        return (self.process.doing if self.process is not None else "") or self.state.value

    @property
    def given_up(self) -> bool:
        """Whether it has died while loading so often that it is not tried again by itself."""
        return self.state is WorkerState.FAILED and self.failed_starts >= MAX_FAILED_STARTS

    @property
    def back_off_s(self) -> float:
        """How long to wait before the next start."""
        return min(MAX_BACK_OFF_S, 2.0 ** max(0, self.setbacks - 1))

    def died(self, was_ready: bool) -> None:
        """Go to FAILED, and count it: loading is no proof that it works."""
        self.step("died")
        self.setbacks += 1
        self.failed_starts = 0 if was_ready else self.failed_starts + 1

    def forgive(self) -> None:
        """It has worked for long enough, or an operator has seen to it: its next death is the first."""
        self.setbacks = self.failed_starts = 0

    def step(self, event: str) -> None:
        """Go where the table says; raises `IllegalTransition` where it says nothing."""
        after = PLACE_TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalTransition("worker", self.slot.worker, self.state, event)
        self.state = after
