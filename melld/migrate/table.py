"""The states, events and transitions of a migration, as data.

Owns the table alone; `migration` executes it and draws it.
"""

import enum
from collections.abc import Mapping, Sequence


class MoveState(enum.StrEnum):
    """State of a migration."""

    QUEUED = "queued"  # waits for its turn
    LOOKING = "looking"  # the source reports its state
    RESERVING = "reserving"  # the destination makes room
    WARMING = "warming"  # the destination computes the blocks itself; the source decodes on
    COPYING = "copying"  # full blocks are pulled; the source decodes on
    CHECKING = "checking"  # the source reports what was added since
    FOLLOWING = "following"  # the source computes the prompt on, and stops after the first token
    FREEZING = "freezing"  # the source stops
    ATTACHING = "attaching"  # the destination pulls the rest and takes over
    RELEASING = "releasing"  # committed: the source frees its blocks
    THAWING = "thawing"  # rolled back: the source resumes
    THAWING_ALONE = "thawing alone"  # the same, and the destination is dead
    CANCELLING = "cancelling"  # the destination frees its room
    ENDED = "ended"


class Sign(enum.StrEnum):
    """Meaning of an event for a migration."""

    STARTED = "started"
    BY_KV = "can go by kv"
    BY_TOKENS = "can go by tokens"
    MORE = "has blocks to copy"
    ENOUGH = "has little left to do"
    WARMED = "computed"
    BEHIND = "has tokens to compute"
    COPIED = "copied"
    AWAITED = "first token awaited"
    FROZEN = "frozen"
    ATTACHED = "attached"
    RELEASED = "released"
    THAWED = "thawed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    COPY_FAILED = "copy failed"
    LATE = "deadline passed"
    GONE = "request ended"
    SOURCE_LOST = "source died"
    DESTINATION_LOST = "destination died"


class Outcome(enum.StrEnum):
    """End of a migration."""

    COMMITTED = "committed"
    REFUSED = "refused"
    COPY_FAILED = "copy failed"
    TIMED_OUT = "timed out"
    REQUEST_ENDED = "request ended"
    SOURCE_DIED = "source died"
    DESTINATION_DIED = "destination died"


_S, _E = MoveState, Sign
_ROWS: Sequence[tuple[Sequence[MoveState], Sequence[Sign], MoveState]] = (
    ([_S.QUEUED], [_E.STARTED], _S.LOOKING),
    ([_S.QUEUED], [_E.GONE, _E.SOURCE_LOST, _E.DESTINATION_LOST], _S.ENDED),
    ([_S.LOOKING], [_E.BY_KV], _S.RESERVING),
    ([_S.LOOKING], [_E.BY_TOKENS], _S.WARMING),
    ([_S.LOOKING], [_E.REFUSED, _E.LATE, _E.GONE, _E.SOURCE_LOST, _E.DESTINATION_LOST], _S.ENDED),
    ([_S.RESERVING], [_E.MORE], _S.COPYING),
    ([_S.RESERVING], [_E.ENOUGH], _S.FREEZING),
    ([_S.RESERVING], [_E.AWAITED], _S.FOLLOWING),
    ([_S.RESERVING], [_E.REFUSED], _S.ENDED),
    ([_S.WARMING], [_E.WARMED], _S.CHECKING),
    ([_S.COPYING], [_E.COPIED], _S.CHECKING),
    ([_S.COPYING], [_E.AWAITED], _S.FOLLOWING),
    ([_S.COPYING], [_E.COPY_FAILED], _S.CANCELLING),
    ([_S.CHECKING], [_E.MORE], _S.COPYING),
    ([_S.CHECKING], [_E.BEHIND], _S.WARMING),
    ([_S.CHECKING], [_E.ENOUGH], _S.FREEZING),
    ([_S.WARMING, _S.COPYING, _S.CHECKING], [_E.REFUSED], _S.CANCELLING),
    ([_S.RESERVING, _S.WARMING, _S.COPYING, _S.CHECKING], [_E.LATE, _E.GONE, _E.SOURCE_LOST], _S.CANCELLING),
    ([_S.RESERVING, _S.WARMING, _S.COPYING, _S.CHECKING], [_E.DESTINATION_LOST], _S.ENDED),
    ([_S.FOLLOWING], [_E.MORE], _S.COPYING),
    ([_S.FOLLOWING], [_E.AWAITED], _S.FOLLOWING),
    ([_S.FOLLOWING, _S.FREEZING], [_E.FROZEN], _S.ATTACHING),
    ([_S.FOLLOWING, _S.FREEZING], [_E.REFUSED], _S.CANCELLING),
    ([_S.ATTACHING], [_E.ATTACHED], _S.RELEASING),
    ([_S.ATTACHING], [_E.REFUSED, _E.COPY_FAILED], _S.THAWING),
    ([_S.FOLLOWING, _S.FREEZING, _S.ATTACHING], [_E.LATE], _S.THAWING),
    ([_S.FOLLOWING, _S.FREEZING, _S.ATTACHING], [_E.GONE, _E.SOURCE_LOST], _S.CANCELLING),
    ([_S.FOLLOWING, _S.FREEZING, _S.ATTACHING], [_E.DESTINATION_LOST], _S.THAWING_ALONE),
    ([_S.RELEASING], [_E.RELEASED, _E.REFUSED, _E.SOURCE_LOST], _S.ENDED),
    ([_S.RELEASING], [_E.LATE, _E.GONE, _E.DESTINATION_LOST], _S.RELEASING),
    ([_S.THAWING], [_E.THAWED, _E.REFUSED, _E.GONE, _E.SOURCE_LOST], _S.CANCELLING),
    ([_S.THAWING], [_E.LATE], _S.THAWING),
    ([_S.THAWING], [_E.DESTINATION_LOST], _S.THAWING_ALONE),
    ([_S.THAWING_ALONE], [_E.THAWED, _E.REFUSED, _E.GONE, _E.SOURCE_LOST], _S.ENDED),
    ([_S.THAWING_ALONE], [_E.LATE, _E.DESTINATION_LOST], _S.THAWING_ALONE),
    ([_S.CANCELLING], [_E.CANCELLED, _E.REFUSED, _E.DESTINATION_LOST], _S.ENDED),
    ([_S.CANCELLING], [_E.LATE, _E.GONE, _E.SOURCE_LOST], _S.CANCELLING),
)
TRANSITIONS: Mapping[tuple[MoveState, Sign], MoveState] = {
    (state, sign): after for states, signs, after in _ROWS for state in states for sign in signs
}
"""(state, event) -> next state: a row leads from each of its states, on each of its signs, to one.

Commands that free resources (thaw, release, cancel) are repeated when late, until they succeed or the worker is gone.
"""

DEADLINES_S: Mapping[MoveState, float] = {
    MoveState.LOOKING: 10.0,
    MoveState.RESERVING: 10.0,
    MoveState.WARMING: 120.0,
    MoveState.COPYING: 60.0,
    MoveState.CHECKING: 10.0,
    MoveState.FOLLOWING: 15.0,
    MoveState.FREEZING: 10.0,
    MoveState.ATTACHING: 5.0,
    MoveState.RELEASING: 10.0,
    MoveState.THAWING: 10.0,
    MoveState.THAWING_ALONE: 10.0,
    MoveState.CANCELLING: 10.0,
}
"""Time limit of each state's command; short while the request is frozen.  FOLLOWING's runs from the last progress, and
is longer by a step of the source.
"""
