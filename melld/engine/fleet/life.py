"""A worker's life cycle: its process's state, whether it should serve, and one transition table.

Pure, and the same for one model or many, on this machine or in a cluster.  Typed events go in, and what to do comes
out; the supervisor does it.  Whatever else is said of a worker's state is derived from here.

A worker is to serve unless somebody has it leave: an operator (a drain, a loan), the Landlord, or the daemon.  The
strictest of their wishes counts.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from melld.errors import IllegalTransition
from melld.ids import WorkerId

MAX_FAILED_STARTS = 5
MAX_BACK_OFF_S = 60.0
MAX_DOUBLINGS = 6
"""Of a rest of one second, which is then longer than `MAX_BACK_OFF_S`."""


class State(enum.StrEnum):
    """State of a worker's process."""

    STOPPED = "stopped"  # there is none
    STARTING = "starting"  # it loads the model, or ends to make room for one that does
    READY = "ready"  # it serves
    ASLEEP = "asleep"  # it could serve at once, and is not needed
    DOZING = "dozing"  # it waits without weights and KV memory
    STOPPING = "stopping"  # it ends, or goes to doze
    FAILED = "failed"  # it has died


class Event(enum.StrEnum):
    """Facts about a worker, and requests to change it."""

    IS_READY = "ready"
    HAS_DOZED = "dozed"
    ENDED = "ended"
    DIED = "died"
    WAKE = "wake"
    RETRY = "retry"
    SLEEP = "sleep"
    DOZE = "doze"
    STOP = "stop"


FACTS = frozenset({Event.IS_READY, Event.HAS_DOZED, Event.ENDED, Event.DIED})
"""Events that must be in the table.  A wish that is not changes nothing."""


class Do(enum.StrEnum):
    """Action that an event leads to."""

    NOTHING = "nothing"
    BEGIN = "begin"  # start a process, or wake the one that dozes
    DOZE = "doze"  # ask it to doze
    END = "end"  # ask it to end
    KILL = "kill"  # the same of one that has nothing to clean up


class Intent(enum.IntEnum):
    """Intended use of a worker."""

    IN_SERVICE = 0
    DRAINING = 1  # until its requests have left
    OUT = 2


class Who(enum.StrEnum):
    """Parties that can take a worker out of service."""

    OPERATOR = "operator"
    LANDLORD = "landlord"
    DAEMON = "daemon"


class Guard(enum.StrEnum):
    """A condition of a step."""

    NONE = ""
    MAY_START = "in service, and no obstacle"
    NOT_GIVEN_UP = "same, and not given up"
    GIVEN_UP = "same, and given up"


class Step(NamedTuple):
    """The state that an event leads to, what to do then, and the guard that must hold."""

    after: State
    do: Do = Do.NOTHING
    guard: Guard = Guard.NONE


_S, _E = State, Event
_ROWS: Sequence[tuple[Sequence[State], Event, Step]] = (
    ([_S.STOPPED, _S.DOZING, _S.STOPPING], _E.WAKE, Step(_S.STARTING, Do.BEGIN, Guard.MAY_START)),
    ([_S.STARTING], _E.IS_READY, Step(_S.READY)),
    ([_S.READY], _E.SLEEP, Step(_S.ASLEEP)),
    ([_S.ASLEEP], _E.WAKE, Step(_S.READY)),
    ([_S.READY, _S.ASLEEP], _E.DOZE, Step(_S.STOPPING, Do.DOZE)),
    ([_S.STOPPING], _E.HAS_DOZED, Step(_S.DOZING)),
    ([_S.READY, _S.ASLEEP], _E.STOP, Step(_S.STOPPING, Do.END)),
    ([_S.STARTING, _S.DOZING, _S.STOPPING], _E.STOP, Step(_S.STOPPING, Do.KILL)),
    ([_S.STOPPING], _E.ENDED, Step(_S.STOPPED)),
    ([_S.STARTING], _E.ENDED, Step(_S.STARTING, Do.BEGIN)),
    ([state for state in _S if state is not _S.FAILED], _E.DIED, Step(_S.FAILED)),
    ([_S.FAILED], _E.RETRY, Step(_S.STARTING, Do.BEGIN, Guard.NOT_GIVEN_UP)),
    ([_S.FAILED], _E.WAKE, Step(_S.STARTING, Do.BEGIN, Guard.GIVEN_UP)),
    ([_S.FAILED], _E.STOP, Step(_S.STOPPED)),
)
TRANSITIONS: Mapping[tuple[State, Event], Step] = {
    (state, event): step for states, event, step in _ROWS for state in states
}
"""The only table of a worker's life."""
WARM = frozenset({State.READY, State.ASLEEP})
"""States in which a worker has its model loaded and answers at once."""


class WorkerLife:
    """Life of a worker."""

    def __init__(self, worker: WorkerId) -> None:
        self.state = State.STOPPED
        self.failed_starts = 0
        """Deaths in a row while loading."""
        self.restarts = self.setbacks = 0
        """Deaths since it last ran for long enough."""
        self.obstacle = ""
        """What keeps it from being started, in words: another program fills its device, or its machine is lost."""
        self._worker = worker
        self._patience: float = MAX_FAILED_STARTS
        self._wishes: dict[Who, Intent] = {}

    @property
    def intent(self) -> Intent:
        """Return whether it should serve."""
        return max(self._wishes.values(), default=Intent.IN_SERVICE)

    def wish(self, who: Who, intent: Intent) -> None:
        """Note what a party wants of it."""
        self._wishes[who] = intent

    def wished_by(self, who: Who) -> Intent:
        """Return what that party wants of it."""
        return self._wishes.get(who, Intent.IN_SERVICE)

    @property
    def given_up(self) -> bool:
        """Return True if it has died too often while loading to be restarted without an operator."""
        return self.state is State.FAILED and self.failed_starts >= self._patience

    @property
    def back_off_s(self) -> float:
        """Return the seconds to wait after a death until the next start."""
        return min(MAX_BACK_OFF_S, 2.0 ** min(max(0, self.setbacks - 1), MAX_DOUBLINGS))

    def never_give_up(self) -> None:
        """Keep retrying, however many starts fail."""
        self._patience = math.inf

    def forgive(self) -> None:
        """Reset the counts of deaths: it has run for long enough, or somebody vouches for it."""
        self.setbacks = self.failed_starts = 0

    def may(self, event: Event) -> bool:
        """Return True if the table has the step and its guard holds."""
        step = TRANSITIONS.get((self.state, event))
        return step is not None and self._holds(step.guard)

    def take(self, event: Event) -> Do:
        """Make the table's transition; return its actions.

        Raises:
            IllegalTransition: the event is a fact that contradicts what is known; nothing has changed.
        """
        if not self.may(event):
            if event in FACTS:
                raise IllegalTransition("worker", self._worker, self.state, event)
            return Do.NOTHING
        step = TRANSITIONS[self.state, event]
        if event is Event.DIED:
            self.setbacks += 1
            self.failed_starts = 0 if self.state in WARM else self.failed_starts + (self.state is State.STARTING)
        elif event is Event.IS_READY:
            self.failed_starts = 0
        elif step.guard is Guard.GIVEN_UP:
            self.forgive()
        self.restarts += event is Event.RETRY
        self.state = step.after
        return step.do

    def _holds(self, guard: Guard) -> bool:
        if guard is Guard.NONE:
            return True
        may_start = self.intent is Intent.IN_SERVICE and not self.obstacle
        return may_start and (guard is Guard.MAY_START or self.given_up == (guard is Guard.GIVEN_UP))
