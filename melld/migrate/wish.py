"""The record of a move: one object from the scheduler's command to the end, which all who carry the move out share.

The planner says in it why the move waits and by which way it goes, the executor adds its number and its lease, and the
migration reads it.  Pure data.
"""

import enum
import math
from collections.abc import Mapping

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate.packing import Way
from melld.migrate.snapshot import Via

BOTH = (Via.KV, Via.TOKENS)


class Cause(enum.StrEnum):
    """Why a move waits."""

    EPOCH = "the next epoch has not begun"
    LINK = "the link is full"
    SHARED = "other moves fill a segment that its link shares"
    COMPUTE = "the destination's budget for foreign prefill is used up"
    BOTH = "the link is full, and the destination's budget for foreign prefill is used up"
    ELDER = "another move has waited longer"
    NO_WAY = "the destination is not ready"


class MovePace(msgspec.Struct, frozen=True):
    """Rate limit of a way beside decoding, in bytes or tokens, and its time at that rate; 0: no limit."""

    per_s: float = 0.0
    takes_s: float = 0.0


class Wish(msgspec.Struct, kw_only=True, eq=False):
    """A move.

    `via`: the only way that it may go; None: by KV where possible.  `asked`: by an operator, who waits for it.
    `after_first_token`: follow the prompt as it is computed, by KV, and hand over after its first token.
    `reason`, `cause`: why, and the event on which it was decided.

    `ways`: those that its request, link and destination allow now; it waits while there are none.
    It has waited since `since_s`, for `epochs` epochs, because of `waits_for`.

    `way`: what it draws from since it has begun, `unpaid` of its cost in later epochs; `has_ended`: it draws no more.
    `move`: its number.  `lease`: of the destination's output.  `paces`: of the ways on which it takes several epochs.
    """

    request: RequestId
    source: WorkerId
    destination: WorkerId
    kv_bytes: int = 0
    tokens: int = 1
    urgency_s: float = math.inf
    via: Via | None = None
    asked: bool = False
    after_first_token: bool = False
    reason: str = ""
    cause: EventId = NO_EVENT
    ways: tuple[Via, ...] = BOTH
    since_s: float = 0.0
    epochs: int = 0
    waits_for: Cause = Cause.EPOCH
    way: Way | None = None
    unpaid: int = 0
    has_ended: bool = False
    move: int = 0
    lease: int = 0
    paces: Mapping[Via, MovePace] = {}

    @property
    def link(self) -> tuple[WorkerId, WorkerId]:
        """Return source and destination."""
        return self.source, self.destination

    @property
    def planned(self) -> Via | None:
        """Return the way that the planner has chosen; None before."""
        return None if self.way is None else self.way.via
