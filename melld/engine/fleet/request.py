"""A request in the fleet: its owner, the tokens its client may have seen, and the deaths it was present at.

Owns one request's facts and how they change together.  Sends nothing: `fleet` does.

    admitted ──► placed ──► taken ──► outputs under the valid lease ──► ended
                   ▲  │                 │
                   │  └── handed over: another worker, another lease
                   └───── its worker is gone, or it is suspended: no owner, and a new lease
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.engine.wire.frames import MAX_FRAME_BYTES
from melld.errors import InputTooLarge, MelldError
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 2
"""Encoded, with its images.  The other half of a frame is for its output tokens when it resumes elsewhere."""
MAX_DEATHS = 2
PROOF_TOKENS = 4
"""Tokens after which a suspect is acquitted."""
MAX_HARMS = 8
"""Workers ended from outside under it: a guard of the machine's memory, say, may end them because of the request."""


class RequestKilledWorkers(MelldError):
    """The request was running when a second worker died, or when many were killed from outside."""

    code = "request_kills_workers"
    should_retry = False

    def __init__(self, request: str, workers: int) -> None:
        super().__init__(f"request {request} was running when {workers} workers died: not retrying it")


class RequestNotTaken(MelldError):
    """A worker rejected the request."""

    code = "request_not_taken"

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(f"request {request} was rejected by its worker: {reason}")


class Live(msgspec.Struct):
    """An admitted, unfinished request."""

    request: RequestId
    core_request: bytes
    """vLLM's `EngineCoreRequest` in vLLM's encoding: all that a worker needs to start it, images included."""
    prompt_tokens: int
    priority: int
    arrived_s: float
    lease: int = 0
    """Outputs under any other lease are dropped."""
    leases: int = 0
    """Leases given out, valid or not: none is ever given again."""
    moves: int = 0
    suspensions: int = 0
    first_token_s: float = 0.0
    """When its first output token came; 0 until then."""
    last_output_s: float = 0.0
    is_interrupted: bool = False
    """It was handed over, or lost its worker, since its last output."""
    cause: EventId = NO_EVENT
    """The event on which it was last placed or moved."""
    worker: WorkerId | None = None
    output_token_ids: list[int] = []
    deaths: int = 0
    """Workers that died under it, one after the other, since it last made `PROOF_TOKENS` tokens."""
    harms: int = 0
    """Workers that were ended from outside under it, likewise."""
    taken: bool = False
    """Its worker has received it: only then may the worker's death be its doing."""
    proven_tokens: int = 0
    """Number of output tokens that acquits it of those deaths."""
    admitted: bool = False
    refusal: MelldError | None = None
    """Why it is not admitted."""

    @property
    def is_new(self) -> bool:
        """Return True if it starts from its prompt: it has no token and has left no worker."""
        return self.lease == 0 and not self.output_token_ids

    @property
    def kills_workers(self) -> bool:
        """Return True if it was present at too many deaths to be retried."""
        return self.deaths >= MAX_DEATHS or self.harms >= MAX_HARMS

    def is_of(self, worker: WorkerId, lease: int) -> bool:
        """Return True if the worker owns the request under this lease."""
        return self.worker == worker and self.lease == lease

    def new_lease(self) -> int:
        """Return an unused lease.  It becomes valid when the request is placed or handed over under it."""
        self.leases += 1
        return self.leases

    def hand_over(self, worker: WorkerId, lease: int, cause: EventId = NO_EVENT) -> None:
        """Make the worker the request's owner under this lease."""
        self.worker, self.lease, self.cause = worker, lease, cause
        self.moves += 1
        self.taken = self.is_interrupted = True

    def leave_worker(self) -> None:
        """Detach the request from its worker: it has no owner until it is placed again."""
        self.worker = None
        self.lease = self.new_lease()
        self.is_interrupted |= bool(self.output_token_ids)

    def lose_worker(self, is_suspect: bool, from_outside: bool = False) -> None:
        """Detach the request from its dead worker, whose death counts against it if the worker had received it."""
        self.leave_worker()
        self.deaths += is_suspect and self.taken and not from_outside
        self.harms += is_suspect and self.taken and from_outside
        self.proven_tokens = len(self.output_token_ids) + PROOF_TOKENS

    def log(self, token_ids: Sequence[int]) -> bool:
        """Add tokens that the client may see; return True once they clear the request of suspicion."""
        self.output_token_ids.extend(token_ids)
        if not (self.deaths or self.harms) or len(self.output_token_ids) < self.proven_tokens:
            return False
        self.deaths = self.harms = 0
        return True


def new_live(core_request: Any, encode: Callable[[Any], bytes], now_s: float) -> Live:
    """Return the record of vLLM's `EngineCoreRequest`, not admitted yet.

    Raises:
        InputTooLarge: it fits no frame.
    """
    encoded = encode(core_request)
    if len(encoded) > MAX_REQUEST_BYTES:
        raise InputTooLarge(core_request.request_id, len(encoded), MAX_REQUEST_BYTES)
    prompt = core_request.prompt_embeds if core_request.prompt_token_ids is None else core_request.prompt_token_ids
    return Live(
        request=RequestId(core_request.request_id),
        core_request=encoded,
        prompt_tokens=0 if prompt is None else len(prompt),
        priority=core_request.priority,
        arrived_s=now_s,
    )


def prefix_salt(core_request: Any) -> tuple[Any, ...]:
    """Return what, besides tokens, two requests must have in common to share KV.

    Images stand for tokens that look alike: requests with images share with those that have the same ones.
    """
    lora = core_request.lora_request
    images = tuple(one.identifier for one in core_request.mm_features or ())
    return core_request.cache_salt, lora.lora_name if lora is not None else None, images
