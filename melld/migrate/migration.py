"""State machine of one migration: one enum, one table, facts in, commands out.

Owns the allowed steps and the roll-back, which is a path through the same table.  Pure: no I/O, no clock.

    QUEUED ─► LOOKING ─► RESERVING ─► COPYING ⇄ CHECKING ─► FREEZING ─► ATTACHING ─► RELEASING ─► ENDED   by KV
                   │                     ⇅
                   │                 FOLLOWING ─► ATTACHING ─► ...             by KV, after a prompt's first token
                   └────────────────► WARMING ⇄ CHECKING ─► FREEZING ─► ...                          by tokens

    failure before FREEZING:     CANCELLING ─► ENDED                        (the source never noticed)
            from FREEZING on:    THAWING ─► CANCELLING ─► ENDED             (the source resumes)

FOLLOWING's command waits at the source until a chunk of the prompt is computed, or freezes the request once its first
token is: only the last chunk's blocks are left to pull.  A request whose first token comes sooner decodes on while they
are pulled, like any other.

Entering a state sends its one command, which ends in exactly one event: its answer, its refusal, its deadline, or the
loss of its worker.  The daemon hands the request over when it reads `RequestAttached` (`HandOver`): before, the
source's lease is valid, after, the destination's.  Between freeze and hand-over nobody emits: later output of a
destination that was given up bears a lease that never became valid.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from melld.errors import IllegalTransition
from melld.ids import WorkerId
from melld.migrate import messages as say
from melld.migrate.snapshot import RequestFacts, Via
from melld.migrate.table import DEADLINES_S, TRANSITIONS, MoveState, Outcome, Sign
from melld.migrate.wish import BOTH, MovePace, Wish

HEADROOM_TOKENS = 64
"""Room reserved beyond the present tokens: the request grows while it is copied."""
FEW_BLOCKS = 2
"""Full blocks that may be left for after the freeze."""
FEW_TOKENS = 48
"""Tokens that may be left to compute after the freeze: little more than the last block, which is always left."""
MAX_ROUNDS = 6


_TO_SOURCE = frozenset(
    {
        MoveState.LOOKING,
        MoveState.CHECKING,
        MoveState.FOLLOWING,
        MoveState.FREEZING,
        MoveState.RELEASING,
        MoveState.THAWING,
        MoveState.THAWING_ALONE,
    }
)
_FAILURES = {
    Sign.REFUSED: Outcome.REFUSED,
    Sign.COPY_FAILED: Outcome.COPY_FAILED,
    Sign.LATE: Outcome.TIMED_OUT,
    Sign.GONE: Outcome.REQUEST_ENDED,
    Sign.SOURCE_LOST: Outcome.SOURCE_DIED,
    Sign.DESTINATION_LOST: Outcome.DESTINATION_DIED,
}
_SIGNS: Mapping[type, Sign] = {
    say.BlocksCopied: Sign.COPIED,
    say.RequestFrozen: Sign.FROZEN,
    say.RequestAttached: Sign.ATTACHED,
    say.RequestReleased: Sign.RELEASED,
    say.RequestThawed: Sign.THAWED,
    say.ReservationCancelled: Sign.CANCELLED,
    say.CopyFailed: Sign.COPY_FAILED,
    say.CommandFailed: Sign.REFUSED,
}


class Tell(msgspec.Struct, frozen=True):
    """Action: send a worker this command; without an answer within `deadline_s`, report `Sign.LATE`."""

    worker: WorkerId
    command: Any
    deadline_s: float


class HandOver(msgspec.Struct, frozen=True):
    """Action: commit; the request belongs to the destination from now on, under this lease.

    The source holds its blocks until it has read the release that was sent before.
    """

    lease: int


class Finish(msgspec.Struct, frozen=True):
    """Action: end the migration; no command is open."""

    outcome: Outcome


Action = Tell | HandOver | Finish


class Migration:
    """A migration.  `story` holds what happened, in order: (seconds, what)."""

    def __init__(self, wish: Wish, now_s: float) -> None:
        self.wish = wish
        self.state = MoveState.QUEUED
        self.via = wish.via or Via.KV
        self.outcome: Outcome | None = None
        self.reason = ""
        self.number = 0
        self.rounds = 0
        self.copied_blocks = 0
        self.copied_bytes = 0
        self.copy_s = 0.0
        self.began_s = now_s
        self.story: list[tuple[float, str]] = []
        self._facts: RequestFacts | None = None
        self._source_step_s = 0.0
        self._sent_blocks = 0
        self._sent_epoch = -1
        self._sent_tokens = 0
        self._warmed = 0
        self._progress_s = now_s

    def answered(self, answer: say.MoveAnswer, now_s: float) -> list[Action]:
        """Handle a worker's answer; return the next actions.  Ignore answers to earlier commands."""
        if answer.number != self.number or self.state is MoveState.ENDED:
            return []
        self._learn(answer)
        return self.happened(self._sign_of(answer), now_s)

    def happened(self, sign: Sign, now_s: float) -> list[Action]:
        """Take the step of an event; return the next actions.

        Raises:
            IllegalTransition: the table has no such row; nothing has changed.
        """
        before = self.state
        if before is not MoveState.FOLLOWING:
            self._progress_s = now_s
        after = TRANSITIONS.get((before, sign))
        if after is None:
            raise IllegalTransition("migration", str(self.wish.move), before, sign, self.told())
        self.story.append((now_s, sign.value))
        self.state = after
        if self.outcome is None and (sign is Sign.ATTACHED or sign in _FAILURES):
            self.outcome = _FAILURES.get(sign, Outcome.COMMITTED)
            self.reason = self.reason or ("" if sign is Sign.ATTACHED else sign.value)
        actions: list[Action] = []
        if after is MoveState.ENDED:
            assert self.outcome is not None, self.told()
            actions.append(Finish(self.outcome))
        elif after is not before or sign in (Sign.LATE, Sign.AWAITED):
            actions.append(self._tell(now_s))
        if sign is Sign.ATTACHED:  # after the release: commands that use the source's room arrive after it
            actions.append(HandOver(self.wish.lease))
        return actions

    def told(self) -> tuple[str, ...]:
        """Return the story as lines."""
        return tuple(f"{(at_s - self.began_s) * 1e3:.1f} ms {what}" for at_s, what in self.story)

    # -- events ------------------------------------------------------------------------------------------------------

    def _learn(self, answer: say.MoveAnswer) -> None:
        match answer:
            case say.RequestDescribed():
                self._facts, self._source_step_s = answer.facts, answer.step_s
            case say.BlocksCopied() | say.RequestAttached():
                self.rounds += answer.blocks > 0
                self.copied_blocks += answer.blocks
                self.copied_bytes += answer.nbytes
                self.copy_s += answer.copy_s
            case say.CommandFailed() | say.CopyFailed():
                self.reason = self.reason or answer.reason

    def _sign_of(self, answer: say.MoveAnswer) -> Sign:
        if isinstance(answer, say.RequestDescribed) and self.state is MoveState.LOOKING:
            return self._way(answer)
        if isinstance(answer, say.RoomReserved) and self.state is MoveState.WARMING:
            self._warmed += 1
            return Sign.WARMED
        if isinstance(answer, say.RequestDescribed | say.RoomReserved):
            return self._how_much()
        if isinstance(answer, say.BlocksCopied) and self._follows:
            return Sign.AWAITED
        return _SIGNS[type(answer)]

    def _way(self, described: say.RequestDescribed) -> Sign:
        """Choose the way; try both if the wish names none."""
        ways = BOTH if self.wish.via is None else (self.wish.via,)
        for way in ways:
            if way not in described.refusals:
                self.via = way
                return Sign.BY_KV if way is Via.KV else Sign.BY_TOKENS
        self.reason = described.refusals[ways[0]]
        return Sign.REFUSED

    def _how_much(self) -> Sign:
        facts = self._facts
        if facts is None:
            return Sign.ENOUGH
        if self.via is Via.TOKENS:
            behind = facts.num_tokens - self._sent_tokens
            return Sign.BEHIND if behind > FEW_TOKENS and self._warmed < MAX_ROUNDS else Sign.ENOUGH
        left = facts.full_blocks - (self._sent_blocks if facts.block_epoch == self._sent_epoch else 0)
        if self._follows or self.state is MoveState.FOLLOWING:
            return Sign.MORE if left > 0 else Sign.AWAITED
        allowed = 0 if self.state is MoveState.RESERVING else FEW_BLOCKS
        return Sign.MORE if left > allowed and self.rounds < MAX_ROUNDS else Sign.ENOUGH

    @property
    def _follows(self) -> bool:
        """Return True while the request must not move because its first token has not been seen."""
        return self.wish.after_first_token and self._facts is not None and self._facts.in_prompt

    # -- commands ----------------------------------------------------------------------------------------------------

    def _tell(self, now_s: float) -> Tell:
        self.number += 1
        wish = self.wish
        worker = wish.source if self.state in _TO_SOURCE else wish.destination
        paced_s = self._pace().takes_s if self.state in (MoveState.COPYING, MoveState.WARMING) else 0.0
        deadline_s = DEADLINES_S[self.state] + paced_s
        if self.state is MoveState.FOLLOWING:
            deadline_s += self._source_step_s - (now_s - self._progress_s)
        return Tell(worker, self._command(), max(deadline_s, 0.0))

    def _pace(self) -> MovePace:
        return self.wish.paces.get(self.via, MovePace())

    def _command(self) -> say.MoveCommand:
        wish, facts = self.wish, self._facts
        names: dict[str, Any] = {
            "move": wish.move,
            "number": self.number,
            "request": wish.request,
            "cause": wish.cause,
        }
        match self.state:
            case MoveState.LOOKING | MoveState.CHECKING:
                return say.DescribeRequest(**names, freeze_after_first_token=wish.after_first_token)
            case MoveState.FREEZING:
                return say.FreezeRequest(**names, via=self.via)
            case MoveState.ATTACHING:
                return say.AttachRequest(**names, source=wish.source, via=self.via, lease=wish.lease)
            case MoveState.RELEASING:
                return say.ReleaseRequest(**names)
            case MoveState.THAWING | MoveState.THAWING_ALONE:
                return say.ThawRequest(**names)
            case MoveState.CANCELLING:
                return say.CancelReservation(**names, lease=wish.lease)
        assert facts is not None, self.told()
        if self.state is MoveState.FOLLOWING:
            return say.DescribeRequest(**names, freeze_after_first_token=True, beyond=facts.full_blocks)
        capacity = facts.num_tokens + HEADROOM_TOKENS
        if self.state is MoveState.COPYING:
            self._sent_blocks = facts.full_blocks
            self._sent_epoch = facts.block_epoch
            return say.CopyBlocks(
                **names,
                source=wish.source,
                block_ids=facts.full_block_ids,
                block_epoch=facts.block_epoch,
                token_capacity=capacity,
                bytes_per_s=self._pace().per_s,
            )
        self._sent_tokens = facts.num_tokens
        if self.state is MoveState.RESERVING:
            return say.ReserveBlocks(**names, token_capacity=capacity, computed_tokens=facts.num_computed_tokens)
        return say.WarmRequest(**names, token_capacity=capacity, tokens_per_s=self._pace().per_s)
