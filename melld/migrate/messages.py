"""What is said about one migration: commands to the two workers, and their answers.

Owns the shapes, without I/O; the frames of `engine/wire` carry them.  Each command is answered exactly once, by the
event named in its docstring, by `CopyFailed` or by `CommandFailed`; `move` and `number` tell an answer to which command
it belongs, so that one that comes late, or twice, is known for what it is.
"""

import msgspec

from melld.migrate.snapshot import Via

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV cache group, in the order of the request's tokens."""


class MoveMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Concerns the `number`th command of the migration `move` of `request`."""

    move: int
    number: int
    request: str


# -- commands ----------------------------------------------------------------------------------------------------------


class DescribeRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: where does it stand, and which of its blocks will not change again?  `RequestDescribed`."""


class ReserveBlocks(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: keep room for so many tokens.  `RoomReserved`.

    Payload: vLLM's `EngineCoreRequest`, and the output tokens so far (MessagePack).
    """

    token_capacity: int


class WarmRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: compute its blocks from its tokens, then keep room.  `RoomReserved`.

    Said again with the tokens that have come since, until few are left.  `tokens_per_s`: no faster than so beside
    others' decoding; 0: one slice after the other.  Payload: as for `ReserveBlocks`.
    """

    token_capacity: int
    tokens_per_s: float = 0.0


class CopyBlocks(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: pull those of these blocks that are not there yet, beside decoding.  `BlocksCopied`.

    `bytes_per_s`: no faster than so; 0: as fast as the link goes.
    """

    source: str
    block_ids: BlockIds
    block_epoch: int
    token_capacity: int
    bytes_per_s: float = 0.0


class FreezeRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: emit nothing more for it from the next step on.  `RequestFrozen`, after its last output."""

    via: Via


class AttachRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: pull the rest and go on with it under `lease`.  Payload: the snapshot.  `RequestAttached`."""

    source: str
    via: Via
    lease: int


class ReleaseRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: the destination has it; free its blocks.  `RequestReleased`, also where it is not there."""


class ThawRequest(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the source: the move is off, go on with it.  `RequestThawed`, also where it was not frozen."""


class CancelReservation(MoveMessage, frozen=True, tag=True, kw_only=True):
    """To the destination: forget what of the request came by this move, whose outputs would bear `lease`.

    What goes on there under another lease stays.  `ReservationCancelled`, also if nothing is there.
    """

    lease: int


# -- answers -----------------------------------------------------------------------------------------------------------


class RequestDescribed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """Where it stands.  `refusals`: why it cannot go one way or another; the ways that are not named are open."""

    num_tokens: int
    block_ids: BlockIds
    block_epoch: int
    refusals: dict[Via, str] = {}


class RoomReserved(MoveMessage, frozen=True, tag=True, kw_only=True):
    """There is room; of its blocks, so many were in the destination's own prefix cache."""

    blocks: int
    reused_blocks: int


class BlocksCopied(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The blocks' bytes are there."""

    blocks: int
    nbytes: int
    copy_s: float


class RequestFrozen(MoveMessage, frozen=True, tag=True, kw_only=True):
    """Nothing more will come from the source.  Payload: a `RequestSnapshot`."""

    num_tokens: int


class RequestAttached(MoveMessage, frozen=True, tag=True, kw_only=True):
    """It goes on at the destination; the last pull copied so much."""

    blocks: int
    nbytes: int
    copy_s: float


class RequestReleased(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The source holds nothing of it."""


class RequestThawed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The source goes on with it."""


class ReservationCancelled(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The destination holds nothing of it."""


class CopyFailed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """Bytes did not arrive, or not as they were sent: nothing was attached, the room's blocks are worth nothing."""

    reason: str


class CommandFailed(MoveMessage, frozen=True, tag=True, kw_only=True):
    """The command was not carried out, and has changed nothing at the worker."""

    reason: str


MoveCommand = (
    DescribeRequest
    | ReserveBlocks
    | WarmRequest
    | CopyBlocks
    | FreezeRequest
    | AttachRequest
    | ReleaseRequest
    | ThawRequest
    | CancelReservation
)
MoveAnswer = (
    RequestDescribed
    | RoomReserved
    | BlocksCopied
    | RequestFrozen
    | RequestAttached
    | RequestReleased
    | RequestThawed
    | ReservationCancelled
    | CopyFailed
    | CommandFailed
)
