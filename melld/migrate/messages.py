"""The messages of a migration: commands to the two workers, and their answers.

Owns the shapes, without I/O; the frames of `engine/wire` carry them.  Each command gets exactly one answer: the event
named in its docstring, `CopyFailed` or `CommandFailed`.  `move` and `number` match an answer to its command, so that
late and duplicate answers are recognised.
"""

import msgspec

from melld.ids import NO_EVENT, EventId
from melld.migrate.snapshot import RequestFacts, Via

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV cache group, in the order of the request's tokens."""


class MoveMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Message about command `number` of the migration `move` of `request`.

    `cause`: the event on which the move was decided, in commands and in their answers.
    """

    move: int
    number: int
    request: str
    cause: EventId = NO_EVENT


# -- commands ----------------------------------------------------------------------------------------------------------


class DescribeRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: report the request's state and its final blocks.  Answer: `RequestDescribed`.

    `freeze_after_first_token`: the request will leave after its prompt, so that what only a half-computed prompt stands
    in the way of is no refusal.  With `beyond`, the answer waits until the request's full blocks are more than so many
    (or fewer: it was preempted), or for 5 s; and between its first token and the next the request stops:
    `RequestFrozen`.
    """

    freeze_after_first_token: bool = False
    beyond: int | None = None


class ReserveBlocks(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: reserve room for `token_capacity` tokens.  Answer: `RoomReserved`.

    `computed_tokens`: how many of them the source has computed, whose blocks will be copied.

    Payload: vLLM's `EngineCoreRequest`, and the output tokens so far (MessagePack).
    """

    token_capacity: int
    computed_tokens: int = 0


class WarmRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: compute the request's blocks from its tokens, then reserve room.  Answer: `RoomReserved`.

    Repeated with the tokens that were added since, until few are left.  `tokens_per_s`: speed limit beside other
    requests' decoding; 0: one slice after the other.  Payload: as for `ReserveBlocks`.
    """

    token_capacity: int
    tokens_per_s: float = 0.0


class CopyBlocks(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: pull the missing ones of these blocks while decoding.  Answer: `BlocksCopied`.

    `bytes_per_s`: speed limit; 0: as fast as the link.
    """

    source: str
    block_ids: BlockIds
    block_epoch: int
    token_capacity: int
    bytes_per_s: float = 0.0


class FreezeRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: stop the request before the next step.  Answer, after its last output: `RequestFrozen`."""

    via: Via


class AttachRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: pull the rest and run the request under `lease`.  Answer: `RequestAttached`.

    Payload: the snapshot.
    """

    source: str
    via: Via
    lease: int


class ReleaseRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: free the blocks of the request, which has moved.  Answer, also if unknown: `RequestReleased`."""


class ThawRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: resume the request, the move is cancelled.  Answer, also if not frozen: `RequestThawed`."""


class CancelReservation(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: drop all that this move brought of the request.  Answer: `ReservationCancelled`.

    `lease`: the lease of this move; what runs there under another lease stays.  Answered also if nothing is there.
    """

    lease: int


# -- answers -----------------------------------------------------------------------------------------------------------


class RequestDescribed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """State of the request.  `refusals`: why it cannot go by a way; ways that are not named are open.

    `step_s`: how long the source's last step took.
    """

    facts: RequestFacts
    refusals: dict[Via, str] = {}
    step_s: float = 0.0


class RoomReserved(MoveMessage, frozen=True, tag=True, kw_only=True):
    """Room is reserved."""


class BlocksCopied(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The blocks' bytes have arrived."""

    blocks: int
    nbytes: int
    copy_s: float


class RequestFrozen(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The source emits no more of the request.  Payload: a `RequestSnapshot`."""


class RequestAttached(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The request runs at the destination; the fields describe the last pull."""

    blocks: int
    nbytes: int
    copy_s: float


class RequestReleased(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The source holds nothing of the request."""


class RequestThawed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The source runs the request again."""


class ReservationCancelled(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The destination holds nothing of the request."""


class CopyFailed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """Bytes were lost or damaged: nothing was attached, and the reserved blocks are worthless."""

    reason: str


class CommandFailed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The worker did not carry out the command and changed nothing."""

    reason: str


_Arriving = ReserveBlocks | WarmRequest | CopyBlocks | AttachRequest | CancelReservation
MoveCommand = _Arriving | DescribeRequest | FreezeRequest | ReleaseRequest | ThawRequest
_Arrived = RoomReserved | BlocksCopied | RequestAttached | ReservationCancelled | CopyFailed
MoveAnswer = _Arrived | RequestDescribed | RequestFrozen | RequestReleased | RequestThawed | CommandFailed
