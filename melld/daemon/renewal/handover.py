"""The hand-over between two daemons: who takes requests and who has the devices, whichever dies and when.

Pure: one table for both sides.  Each side carries out its commands and tells the other over a channel, whose end of
file means that the other has died.  The old side stops taking requests before it says YOURS, and gives a device only
once that is empty, so two daemons never serve, or compute on one device, at once; a survivor takes everything.

    old   STARTED ──► GIVING ──► CLOSED (of its last device) ──► HANDED_OVER ──► ENDED
             ├──────────┼─────────┼── the new one has ended ─────────┴──► SERVING
             └──────────┴─────────┴── told to stop ──► STOPPED
    new   WAITING ──► READY ──► TAKEN_OVER
             └── the old one has ended ──► ALONE ──► TAKEN_OVER
"""

import enum
from collections.abc import Mapping, Sequence

from melld.errors import IllegalTransition


class State(enum.StrEnum):
    """The state of a side: first those of the daemon being replaced, then those of the one that replaces it."""

    SERVING = "serving"  # as usual
    STARTED = "started"  # the new one is reading its settings and importing
    GIVING = "giving"  # devices are emptied for it one by one, and its first worker loads
    CLOSED = "closed"  # the same for the last device: requests wait at the socket
    HANDED_OVER = "handed over"  # the new one takes requests; running streams finish here
    ENDED = "ended"
    STOPPED = "stopped"  # both end before the new one serves

    WAITING = "waiting"  # for its settings and imports, for devices, and for a worker to load on them
    READY = "ready"  # to take requests
    ALONE = "alone"  # the old one died before that
    TAKEN_OVER = "taken over"


class Event(enum.StrEnum):
    """Events on one side, or messages from the other."""

    WANTS = "wants"  # new to old: asks for a device
    SERVES = "serves"  # new to old: a worker is ready
    NONE_TO_SPARE = "none to spare"  # only the last device is left to drain
    STREAMS_ENDED = "streams ended"
    LEFT = "left"  # the handover file is written
    OTHER_ENDED = "other ended"
    CALLED_OFF = "called off"  # by the operator, or as the old one cannot go on with it
    STOPPED = "stopped"  # one of them was told to end
    GIVEN = "given"  # old to new: here are devices
    WORKER_READY = "worker ready"
    YOURS = "yours"  # old to new, and on the old side once all is said: take the requests


class Command(enum.StrEnum):
    """Actions for one side."""

    LEND = "lend"  # empty the device that is cheapest to drain, or all once nothing runs, and give it
    AWAIT_STREAMS = "await streams"
    CLOSE = "close"  # stop taking requests: they wait at the socket
    LEAVE = "leave"  # write the handover file; it is written again at the end
    SAY_YOURS = "say yours"
    END_OTHER = "end other"
    GO_ON = "go on"  # take requests again, and the devices
    END = "end"  # as at a signal
    ASK = "ask"
    START = "start"  # workers that have all their devices; ask for more
    START_ALL = "start all"
    OFFER = "offer"
    ACCEPT = "accept"  # read the handover file, take requests


Reaction = tuple[State, Sequence[Command]]
_S, _E, _C = State, Event, Command
_UNTIL_OFFERED, _LOADING = (_S.STARTED, _S.GIVING, _S.CLOSED), (_S.GIVING, _S.CLOSED)
_BACK = (_C.END_OTHER, _C.GO_ON)
_ROWS: Sequence[tuple[Sequence[State], Event, State | None, Sequence[Command]]] = (
    ([_S.STARTED, _S.GIVING], _E.WANTS, _S.GIVING, [_C.LEND]),
    ([_S.GIVING], _E.NONE_TO_SPARE, _S.CLOSED, [_C.CLOSE, _C.AWAIT_STREAMS]),
    ([_S.CLOSED], _E.STREAMS_ENDED, _S.CLOSED, [_C.LEND]),
    (_LOADING, _E.SERVES, None, [_C.LEAVE]),
    (_LOADING, _E.LEFT, _S.HANDED_OVER, [_C.CLOSE, _C.SAY_YOURS]),
    (_UNTIL_OFFERED, _E.CALLED_OFF, _S.SERVING, _BACK),
    ([*_UNTIL_OFFERED, _S.HANDED_OVER], _E.OTHER_ENDED, _S.SERVING, _BACK),
    (_UNTIL_OFFERED, _E.STOPPED, _S.STOPPED, [_C.END_OTHER]),
    ([_S.HANDED_OVER], _E.YOURS, _S.HANDED_OVER, [_C.AWAIT_STREAMS]),
    ([_S.HANDED_OVER], _E.WANTS, _S.HANDED_OVER, [_C.LEND]),
    ([_S.HANDED_OVER], _E.CALLED_OFF, _S.HANDED_OVER, []),
    ([_S.HANDED_OVER], _E.STREAMS_ENDED, _S.ENDED, [_C.END]),
    ([_S.HANDED_OVER], _E.STOPPED, _S.ENDED, [_C.END]),
    ([_S.WAITING, _S.TAKEN_OVER], _E.GIVEN, None, [_C.START]),
    ([_S.WAITING], _E.WORKER_READY, _S.READY, [_C.OFFER]),
    ([_S.READY], _E.YOURS, _S.TAKEN_OVER, [_C.ACCEPT, _C.ASK]),
    ([_S.READY], _E.OTHER_ENDED, _S.TAKEN_OVER, [_C.START_ALL, _C.ACCEPT]),
    ([_S.WAITING], _E.OTHER_ENDED, _S.ALONE, [_C.START_ALL]),
    ([_S.ALONE], _E.WORKER_READY, _S.TAKEN_OVER, [_C.ACCEPT]),
    ([_S.TAKEN_OVER], _E.OTHER_ENDED, _S.TAKEN_OVER, [_C.START_ALL]),
)
TABLE: Mapping[tuple[State, Event], Reaction] = {
    (state, event): (after or state, commands) for states, event, after, commands in _ROWS for state in states
}
OVER = frozenset({State.SERVING, State.ENDED, State.STOPPED})
"""The states of the old side in which the renewal is over: events no longer count."""


def step(state: State, event: Event) -> Reaction:
    """Return the next state and what to do.

    Raises:
        IllegalTransition: the event cannot occur in this state.
    """
    if (found := TABLE.get((state, event))) is None:
        raise IllegalTransition("renewal", "", state, event)
    return found
