"""The hand-over between two daemons: who takes requests and who has the devices, whichever dies and when.

Pure: two lifecycles as tables.  Each side carries out its commands and tells the other over a channel, whose end of
file means that the other has died.  The old side stops taking requests before it says YOURS, and gives a device only
once that is empty, so two daemons never serve, or compute on one device, at once; a survivor takes everything.

    old   PREPARING ──► GIVING ──► CLOSED (of its last device) ──► HANDED_OVER ──► ENDED
              └────────────┴─────────┴── the new one has ended ─────────┴──► SERVING
    new   PREPARING ──► WAITING ──► LOADING ──► READY ──► SERVING
              └────────────┴──────────┴── the old one has ended ──► ALONE ──► SERVING
"""

import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar

from melld.errors import IllegalTransition


class Old(enum.StrEnum):
    """The state of the daemon being replaced."""

    SERVING = "serving"  # as usual
    PREPARING = "preparing"  # the new one is reading its settings and importing
    GIVING = "giving"  # devices are emptied for it one by one, and its first worker loads
    CLOSED = "closed"  # the same for the last device: requests wait at the socket
    HANDED_OVER = "handed over"  # the new one takes requests; running streams finish here
    ENDED = "ended"


class New(enum.StrEnum):
    """The state of the daemon that replaces it."""

    PREPARING = "preparing"
    WAITING = "waiting"  # for a device
    LOADING = "loading"
    READY = "ready"  # to take requests
    ALONE = "alone"  # the old one died before that
    SERVING = "serving"
    ENDED = "ended"


class Event(enum.StrEnum):
    """Events on one side, or messages from the other."""

    WANTS = "wants"  # new to old: asks for a device
    SERVES = "serves"  # new to old: a worker is ready
    NONE_TO_SPARE = "none to spare"  # only the last device is left to drain
    STREAMS_ENDED = "streams ended"
    LEFT = "left"  # the handover file is written
    NOT_LEFT = "not left"
    OTHER_ENDED = "other ended"
    CALLED_OFF = "called off"  # by the operator or the old side
    STOPPED = "stopped"  # the old one was told to end
    PREPARED = "prepared"
    GIVEN = "given"  # old to new: here are devices
    SHORT = "short"  # too few for a worker
    WORKER_READY = "worker ready"
    SETTLED = "settled"  # another worker is ready, or has failed
    YOURS = "yours"  # old to new: take the requests


class Command(enum.StrEnum):
    """Actions for one side."""

    LEND = "lend"  # empty the device that is cheapest to drain, and give it
    LEND_ALL = "lend all"
    AWAIT_STREAMS = "await streams"
    CLOSE = "close"  # stop taking requests: they wait at the socket
    OPEN = "open"
    LEAVE = "leave"  # write the handover file; it is written again at the end
    SAY_YOURS = "say yours"
    TAKE_BACK = "take back"  # the devices
    CALL_OFF = "call off"  # end the new one
    END = "end"  # as at a signal
    ASK = "ask"
    START = "start"  # workers that have all their devices
    START_ALL = "start all"
    OFFER = "offer"
    ACCEPT = "accept"  # read the handover file, take requests


State = TypeVar("State", Old, New)
Table = Mapping[tuple[State, Event], tuple[State, Sequence[Command]]]
_O, _N, _E, _C = Old, New, Event, Command
_BACK = (_C.CALL_OFF, _C.TAKE_BACK, _C.OPEN)

OLD_TABLE: Table[Old] = {
    (_O.PREPARING, _E.WANTS): (_O.GIVING, [_C.LEND]),
    (_O.GIVING, _E.WANTS): (_O.GIVING, [_C.LEND]),
    (_O.GIVING, _E.NONE_TO_SPARE): (_O.CLOSED, [_C.CLOSE, _C.AWAIT_STREAMS]),
    (_O.CLOSED, _E.WANTS): (_O.SERVING, _BACK),  # it has all devices, and needs more
    (_O.CLOSED, _E.STREAMS_ENDED): (_O.CLOSED, [_C.LEND_ALL]),
    (_O.HANDED_OVER, _E.WANTS): (_O.HANDED_OVER, [_C.LEND]),
    (_O.HANDED_OVER, _E.NONE_TO_SPARE): (_O.HANDED_OVER, []),
    (_O.HANDED_OVER, _E.STREAMS_ENDED): (_O.ENDED, [_C.END]),
    (_O.HANDED_OVER, _E.CALLED_OFF): (_O.HANDED_OVER, []),
    (_O.HANDED_OVER, _E.OTHER_ENDED): (_O.SERVING, [_C.TAKE_BACK, _C.OPEN]),
    (_O.HANDED_OVER, _E.STOPPED): (_O.ENDED, [_C.END]),
    **{(state, _E.SERVES): (state, [_C.LEAVE]) for state in (_O.GIVING, _O.CLOSED)},
    **{
        (state, _E.LEFT): (_O.HANDED_OVER, [_C.CLOSE, _C.SAY_YOURS, _C.AWAIT_STREAMS])
        for state in (_O.GIVING, _O.CLOSED)
    },
    **{
        (state, event): (_O.SERVING, _BACK)
        for state in (_O.PREPARING, _O.GIVING, _O.CLOSED)
        for event in (_E.NOT_LEFT, _E.CALLED_OFF, _E.OTHER_ENDED)
    },
    **{(state, _E.STOPPED): (_O.ENDED, [_C.CALL_OFF, _C.END]) for state in (_O.PREPARING, _O.GIVING, _O.CLOSED)},
}

NEW_TABLE: Table[New] = {
    (_N.PREPARING, _E.PREPARED): (_N.WAITING, [_C.ASK]),
    (_N.WAITING, _E.GIVEN): (_N.LOADING, [_C.START]),
    (_N.LOADING, _E.SHORT): (_N.WAITING, [_C.ASK]),
    (_N.LOADING, _E.WORKER_READY): (_N.READY, [_C.OFFER]),
    (_N.READY, _E.YOURS): (_N.SERVING, [_C.ACCEPT, _C.ASK]),
    (_N.READY, _E.OTHER_ENDED): (_N.SERVING, [_C.START_ALL, _C.ACCEPT]),
    (_N.ALONE, _E.PREPARED): (_N.ALONE, []),
    (_N.ALONE, _E.WORKER_READY): (_N.SERVING, [_C.ACCEPT]),
    (_N.SERVING, _E.GIVEN): (_N.SERVING, [_C.START]),
    (_N.SERVING, _E.SHORT): (_N.SERVING, [_C.ASK]),
    (_N.SERVING, _E.SETTLED): (_N.SERVING, [_C.ASK]),
    (_N.SERVING, _E.OTHER_ENDED): (_N.SERVING, [_C.START_ALL]),
    **{(state, _E.OTHER_ENDED): (_N.ALONE, [_C.START_ALL]) for state in (_N.PREPARING, _N.WAITING, _N.LOADING)},
    **{
        (state, _E.CALLED_OFF): (_N.ENDED, [_C.END])
        for state in (_N.PREPARING, _N.WAITING, _N.LOADING, _N.READY, _N.ALONE)
    },
}
OLD_TAKES, NEW_TAKES = frozenset({_O.SERVING, _O.PREPARING, _O.GIVING}), frozenset({_N.SERVING})
"""The states in which each side takes requests."""


def step(table: Table[State], state: State, event: Event) -> tuple[State, Sequence[Command]]:
    """Return the next state and what to do.

    Raises:
        IllegalTransition: the event cannot occur in this state.
    """
    if (found := table.get((state, event))) is None:
        raise IllegalTransition("renewal", type(state).__name__, state, event)
    return found
