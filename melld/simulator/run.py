"""One request's passage through a simulation.

QUEUED ─► RUNNING ─► PREEMPTED ─► RUNNING ─► ... ─► ENDED
"""

import enum
from collections.abc import Mapping

from melld.errors import IllegalTransition
from melld.ids import RequestId
from melld.simulator.links import Via


class RunState(enum.Enum):
    """Where the request stands: waiting for a worker, in a worker's memory, pushed out of it, gone."""

    QUEUED = "queued"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


RUN_TRANSITIONS: Mapping[RunState, tuple[RunState, ...]] = {
    RunState.QUEUED: (RunState.RUNNING, RunState.ENDED),
    RunState.RUNNING: (RunState.PREEMPTED, RunState.ENDED),
    RunState.PREEMPTED: (RunState.RUNNING,),
    RunState.ENDED: (),
}


class Move:
    """A migration under way; `version` tells its end from the end of an earlier one."""

    __slots__ = ("destination", "fails", "version", "via")

    def __init__(self, destination: int, via: Via, fails: bool, version: int) -> None:
        self.destination = destination
        self.via = via
        self.fails = fails
        self.version = version


class Run:
    """`row` is its row in `Running` (from its placement on), `worker` the index of its worker.

    `kv_bytes` is its size as last told to the scheduler.  `version` changes whenever its expected end does.
    """

    __slots__ = (
        "first_token_s",
        "id",
        "index",
        "kv_bytes",
        "move",
        "moves",
        "output",
        "prompt",
        "row",
        "state",
        "version",
        "worker",
    )

    def __init__(self, index: int, prompt_tokens: int, output_tokens: int, kv_bytes: int) -> None:
        self.id = RequestId(f"r{index}")
        self.index = index
        self.prompt = prompt_tokens
        self.output = output_tokens
        self.kv_bytes = kv_bytes
        self.row = -1
        self.worker = -1
        self.version = 0
        self.moves = 0
        self.first_token_s = 0.0
        self.move: Move | None = None
        self.state = RunState.QUEUED

    def become(self, state: RunState) -> None:
        """Take the next state; raises `IllegalTransition` where the table has none."""
        if state not in RUN_TRANSITIONS[self.state]:
            raise IllegalTransition("run", self.id, self.state.value, f"become {state.value}")
        self.state = state
