"""States of one request in a simulation, and the error for a simulation that cannot end.

QUEUED ─► RUNNING ─► PREEMPTED ─► RUNNING ─► ... ─► ENDED;  suspended: back to QUEUED
"""

import enum
from collections.abc import Sequence

import msgspec

from melld.errors import IllegalTransition, MelldError
from melld.ids import EventId, RequestId
from melld.migrate.snapshot import Via


class RunState(enum.IntEnum):
    """State of a request: waiting for a worker, in a worker's memory, preempted, ended."""

    QUEUED = 0
    RUNNING = 1
    PREEMPTED = 2
    ENDED = 3


QUEUED = RunState.QUEUED
RUN_TRANSITIONS: Sequence[tuple[RunState, ...]] = (  # by the state that is left
    (RunState.RUNNING, RunState.ENDED),
    (RunState.PREEMPTED, RunState.ENDED, QUEUED),
    (RunState.RUNNING, QUEUED),
    (),
)


class SimulatedMove(msgspec.Struct, eq=False, gc=False):
    """A migration that is decided or under way; `version` tells its end from that of an earlier one."""

    destination: int
    via: Via
    version: int
    cause: EventId
    fails: bool = False


class Run(msgspec.Struct, eq=False, gc=False):
    """A simulated request.  `row`: its row in `Running` once placed; `worker`: the index of its worker.

    `turn`: its prompt goes before those with later ones: (False: urgent; when its first token is due).  `version`
    changes whenever its expected end does.  A struct without garbage collection, because there is one per request and
    nothing that it refers to refers back.
    """

    id: RequestId
    index: int
    prompt: int
    output: int
    prompt_bytes: int
    turn: tuple[bool, float] = (True, 0.0)
    row: int = -1
    worker: int = -1
    version: int = 0
    moves: int = 0
    placed_s: float = 0.0
    first_token_s: float = 0.0
    move: SimulatedMove | None = None
    state: RunState = QUEUED

    def become(self, state: RunState) -> None:
        """Take the next state; raise `IllegalTransition` if the table does not allow it."""
        if state not in RUN_TRANSITIONS[self.state]:
            raise IllegalTransition("run", self.id, self.state.name.lower(), f"become {state.name.lower()}")
        self.state = state


class SimulationStuck(MelldError):
    """Requests wait although nothing runs, and nothing will change that."""

    def __init__(self, waiting: int, at_s: float) -> None:
        super().__init__(f"{waiting} requests wait at {at_s:.0f} s while nothing runs: the policy never places them")
