"""A request's life in the fleet: whose it is, what its client may have seen of it, and which deaths it was there at.

Owns one request's facts, and how they change together.  Sends nothing and tells nobody: `fleet` does.

    admitted ──► placed ──► taken ──► outputs with the lease of now ──► ended
                   ▲  │                 │
                   │  └── handed over: another worker, another lease
                   └───── its worker is gone: nobody's, under a lease that nobody has had
"""

from collections.abc import Sequence

import msgspec

from melld.errors import MelldError
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate.snapshot import RequestSnapshot

MAX_DEATHS = 2
PROOF_TOKENS = 4
"""A suspect that has made so many is acquitted."""
MAX_HARMS = 8
"""Workers that somebody outside ended under it: what guards a machine's memory, say, may do so for its sake."""


class RequestKilledWorkers(MelldError):
    """It was on trial when a second worker died, or under it many were ended from outside: it is not tried again."""

    code = "request_kills_workers"
    should_retry = False

    def __init__(self, request: str, workers: int) -> None:
        super().__init__(f"request {request} was being computed when {workers} workers died: it is not tried again")


class RequestNotTaken(MelldError):
    """A worker could not take it over."""

    code = "request_not_taken"

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(f"request {request} could not be computed: {reason}")


class Live(msgspec.Struct):
    """A request that has been admitted and has not ended."""

    request: RequestId
    core_request: bytes
    """vLLM's `EngineCoreRequest` in vLLM's encoding: all that a worker needs to begin it, images included."""
    prompt_tokens: int
    priority: int
    arrived_s: float
    lease: int = 0
    """Outputs with another one are not its."""
    leases: int = 0
    """Leases that have been given out: also those that never became valid are never given again."""
    moves: int = 0
    last_output_s: float = 0.0
    is_interrupted: bool = False
    """Since its last output it was handed over, or lost its worker."""
    cause: EventId = NO_EVENT
    """The event on which was decided where it is now."""
    worker: WorkerId | None = None
    output_token_ids: list[int] = []
    deaths: int = 0
    """Workers that have died with it, one after the other, since it last made `PROOF_TOKENS` tokens."""
    harms: int = 0
    """Workers that were ended from outside with it, likewise."""
    taken: bool = False
    """Its worker has it: only then its death may be the request's doing."""
    proven_tokens: int = 0
    """With so many output tokens it is acquitted of those deaths."""
    admitted: bool = False
    refusal: MelldError | None = None
    """Why it is not admitted."""

    @property
    def is_new(self) -> bool:
        """Whether it begins from its beginning: it has no token, and has left no worker."""
        return self.lease == 0 and not self.output_token_ids

    @property
    def kills_workers(self) -> bool:
        """Whether it is not to be tried again."""
        return self.deaths >= MAX_DEATHS or self.harms >= MAX_HARMS

    def is_of(self, worker: WorkerId, lease: int) -> bool:
        """Whether what that worker says of it under this lease counts."""
        return self.worker == worker and self.lease == lease

    def new_lease(self) -> int:
        """A lease that nobody has had.  It is valid once the request is placed, or handed over, with it."""
        self.leases += 1
        return self.leases

    def hand_over(self, worker: WorkerId, lease: int, cause: EventId = NO_EVENT) -> None:
        """Make it that worker's from now on, under this lease."""
        self.worker, self.lease, self.cause = worker, lease, cause
        self.moves += 1
        self.taken = self.is_interrupted = True

    def leave_worker(self) -> None:
        """It is nobody's until it is placed again."""
        self.worker = None
        self.lease = self.new_lease()
        self.is_interrupted |= bool(self.output_token_ids)

    def lose_worker(self, is_suspect: bool, from_outside: bool = False) -> None:
        """Its worker is gone; a suspect, unless it had not been taken there, bears this death too."""
        self.leave_worker()
        self.deaths += is_suspect and self.taken and not from_outside
        self.harms += is_suspect and self.taken and from_outside
        self.proven_tokens = len(self.output_token_ids) + PROOF_TOKENS

    def log(self, token_ids: Sequence[int]) -> bool:
        """Its client may see these tokens now.  True if they acquit it of the deaths that it was there at."""
        self.output_token_ids.extend(token_ids)
        if not (self.deaths or self.harms) or len(self.output_token_ids) < self.proven_tokens:
            return False
        self.deaths = self.harms = 0
        return True

    def snapshot(self) -> RequestSnapshot:
        """From which it goes on anywhere: its prompt and its tokens."""
        tokens = list(self.output_token_ids)
        return RequestSnapshot.from_log(self.request, self.core_request, self.prompt_tokens, tokens)
