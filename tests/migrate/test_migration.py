"""The life cycle of a migration: whatever happens in whatever order, one owner, and nothing left behind."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.errors import IllegalTransition
from melld.migrate import messages as say
from melld.migrate.migration import (
    FEW_BLOCKS,
    FEW_TOKENS,
    HEADROOM_TOKENS,
    MAX_ROUNDS,
    HandOver,
    Migration,
    Tell,
)
from melld.migrate.snapshot import RequestFacts, Via
from melld.migrate.table import DEADLINES_S, TRANSITIONS, MoveState, Outcome, Sign
from melld.migrate.wish import MovePace, Wish
from tests.effort import examples
from tests.migrate.migration_world import ALL_CHOICES, CHOICES, CHUNKS, DESTINATION, LENGTH, REQUEST, SOURCE, World

WAYS = [Via.KV, Via.TOKENS, None]


def play(ahead: int, choices: list[int], via: Via | None, after: bool) -> World:
    world = World(via, after_first_token=after)
    world.advance(ahead)
    for choice in choices:
        world.play(choice)
    world.settle()
    return world


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, CHOICES - 1), max_size=60), st.sampled_from(WAYS), st.booleans())
def test_every_history_ends_with_one_owner_and_free_workers(
    ahead: int, choices: list[int], via: Via | None, after: bool
) -> None:
    """Kills, timeouts, refusals and disconnects, in any order: no token lost or doubled, nothing held."""
    world = play(ahead, choices, via, after)
    assert len(world.outcomes) == 1
    assert world.handed_over == (world.outcomes == [Outcome.COMMITTED])
    assert world.finished or world.owner is None
    for worker in world.workers.values():
        assert (worker.copy, worker.room) == (None, False)


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, ALL_CHOICES - 1), max_size=60), st.sampled_from(WAYS), st.booleans())
def test_lost_repeated_and_overtaken_messages_change_nothing(
    ahead: int, choices: list[int], via: Via | None, after: bool
) -> None:
    """Whatever the wires do to a migration's messages, on top of all else: one owner, and nothing held at the end."""
    world = play(ahead, choices, via, after)
    assert len(world.outcomes) == 1
    assert world.handed_over == (world.outcomes == [Outcome.COMMITTED])
    for worker in world.workers.values():
        assert (worker.copy, worker.room) == (None, False)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, 19), max_size=60), st.sampled_from(WAYS), st.booleans())
def test_without_deaths_the_client_gets_every_token(
    ahead: int, choices: list[int], via: Via | None, after: bool
) -> None:
    """Refusals and delays may keep a request where it is, and never cost a token."""
    world = play(ahead, choices, via, after)
    assert world.log == LENGTH


@pytest.mark.parametrize("via", WAYS)
def test_an_undisturbed_migration_commits(via: Via | None) -> None:
    """The ordinary case: the request goes on at its destination, and the source is free."""
    world = World(via)
    for _ in range(12):
        for name in (SOURCE, DESTINATION):
            world.obey(name)
            world.hear(name)
    assert world.outcomes == [Outcome.COMMITTED]
    assert (world.owner, world.lease, world.workers[SOURCE].copy) == (DESTINATION, 1, None)


def test_a_followed_prompt_is_handed_over_after_its_first_token() -> None:
    """However its chunks and the copies fall: the source makes one token, the destination all others."""
    world = World(Via.KV, after_first_token=True)
    for _ in range(CHUNKS):
        world.advance(20)
        assert world.migration.state is MoveState.FOLLOWING
        world.step(SOURCE)
    world.advance(20)
    assert (world.outcomes, world.owner, world.log) == ([Outcome.COMMITTED], DESTINATION, 4)
    assert [what for _, what in world.migration.story].count("has blocks to copy") == CHUNKS


@pytest.mark.parametrize(("state", "sign"), sorted(TRANSITIONS))
def test_every_loss_leads_out_of_every_state(state: MoveState, sign: Sign) -> None:
    """A migration can handle a death, a deadline or an ended request at any time."""
    losses = {Sign.GONE, Sign.SOURCE_LOST, Sign.DESTINATION_LOST} | ({Sign.LATE} if state in DEADLINES_S else set())
    assert all((state, loss) in TRANSITIONS for loss in losses)
    assert TRANSITIONS[state, sign] in DEADLINES_S.keys() | {MoveState.ENDED}


def test_an_impossible_event_changes_nothing() -> None:
    """A bug elsewhere raises an error with the story so far, and makes no second owner."""
    migration = Migration(Wish(move=1, request=REQUEST, source=SOURCE, destination=DESTINATION, lease=1), 0.0)
    with pytest.raises(IllegalTransition, match="migration 1 is queued"):
        migration.happened(Sign.ATTACHED, 1.0)
    assert (migration.state, migration.outcome, migration.story) == (MoveState.QUEUED, None, [])


def test_a_paced_prefill_has_the_time_that_its_pace_takes() -> None:
    """A long prompt at a slow rate is not mistaken for a hung worker; a move by KV has its own pace."""
    paces = {Via.TOKENS: MovePace(50.0, 400.0), Via.KV: MovePace(1e6, 7.0)}
    wish = Wish(move=1, request=REQUEST, source=SOURCE, destination=DESTINATION, via=Via.TOKENS, lease=1, paces=paces)
    migration = Migration(wish, 0.0)
    migration.happened(Sign.STARTED, 0.0)
    facts = RequestFacts(20_000, 0, 0, full_block_ids=((),), block_epoch=1)
    described = say.RequestDescribed(move=1, number=1, request=REQUEST, facts=facts)
    [tell] = migration.answered(described, 0.1)
    assert isinstance(tell, Tell)
    assert (tell.command.tokens_per_s, tell.deadline_s) == (50.0, DEADLINES_S[MoveState.WARMING] + 400.0)


def test_an_answer_to_an_abandoned_command_is_ignored() -> None:
    """A worker that revives after its deadline changes nothing any more."""
    world = World(Via.KV)
    world.obey(SOURCE)
    world.pass_deadline()
    world.hear(SOURCE)
    assert world.outcomes == [Outcome.TIMED_OUT]


NAMES: dict[str, Any] = {"move": 1, "request": REQUEST}
PACES = {Via.KV: MovePace(1e6, 7.0), Via.TOKENS: MovePace(50.0, 400.0)}


class Talk:
    """The daemon's side of one migration; the test speaks for both workers."""

    def __init__(self, via: Via | None = None, paces: Mapping[Via, MovePace] = {}, *, after: bool = False) -> None:
        ends: dict[str, Any] = {"source": SOURCE, "destination": DESTINATION}
        wish = Wish(**NAMES, **ends, via=via, lease=4, paces=paces, after_first_token=after)
        self.migration = Migration(wish, 5.0)
        self.actions = self.migration.happened(Sign.STARTED, 5.0)

    @property
    def told(self) -> Tell:
        tell = self.actions[0]
        assert isinstance(tell, Tell)
        return tell

    def hear(self, answer: type[say.MoveAnswer], **values: Any) -> Any:
        """Send an answer to the last command; return the next one."""
        number = self.migration.number
        self.actions = self.migration.answered(answer(**NAMES, number=number, **values), 5.0 + number)
        return self.told.command if self.actions and isinstance(self.actions[0], Tell) else None

    def describe(
        self,
        blocks: int,
        epoch: int = 0,
        tokens: int = 0,
        refusals: Mapping[Via, str] = {},
        *,
        in_prompt: bool = False,
        step_s: float = 0.0,
    ) -> Any:
        facts = RequestFacts(tokens, 0, 0, (tuple(range(blocks)),), epoch, in_prompt)
        return self.hear(say.RequestDescribed, facts=facts, step_s=step_s, refusals=dict(refusals))

    def copied(self, blocks: int) -> Any:
        return self.hear(say.BlocksCopied, blocks=blocks, nbytes=10 * blocks, copy_s=0.5)

    def reserved(self) -> Any:
        return self.hear(say.RoomReserved)


@pytest.mark.parametrize(("blocks", "epoch", "asked"), [
    (10 + FEW_BLOCKS, 3, say.FreezeRequest),
    (11 + FEW_BLOCKS, 3, say.CopyBlocks),
    (10, 4, say.CopyBlocks),  # the blocks have all been replaced
])  # fmt: skip
def test_a_request_is_frozen_when_few_blocks_are_left(blocks: int, epoch: int, asked: type) -> None:
    """The rest is copied while it is frozen: the client waits for no more than a few blocks."""
    talk = Talk()
    talk.describe(10, epoch=3)
    assert isinstance(talk.reserved(), say.CopyBlocks)
    assert isinstance(talk.copied(10), say.DescribeRequest)
    assert isinstance(talk.describe(blocks, epoch), asked)


@pytest.mark.parametrize(("blocks", "asked"), [(0, say.FreezeRequest), (1, say.CopyBlocks)])
def test_every_full_block_is_copied_before_the_freeze_once(blocks: int, asked: type) -> None:
    """Even a single one: a short request's pause is no longer than a long one's."""
    talk = Talk()
    talk.describe(blocks)
    assert isinstance(talk.reserved(), asked)


@pytest.mark.parametrize(("tokens", "asked"), [(FEW_TOKENS, say.FreezeRequest), (FEW_TOKENS + 1, say.WarmRequest)])
def test_a_request_is_frozen_when_few_tokens_are_left(tokens: int, asked: type) -> None:
    """The same by tokens; the second prompt is only as long as what was added."""
    talk = Talk(Via.TOKENS)
    assert talk.describe(0, tokens=100).token_capacity == 100 + HEADROOM_TOKENS
    talk.reserved()
    assert isinstance(talk.describe(0, tokens=100 + tokens), asked)


def test_a_request_that_grows_faster_than_it_is_copied_still_moves() -> None:
    """After so many rounds it is frozen with whatever is left, by either way."""
    for via in (Via.KV, Via.TOKENS):
        talk, command, rounds, size = Talk(via), None, 0, 0
        while not isinstance(command, say.FreezeRequest):
            size += 1000
            command = talk.describe(size, tokens=size)
            if isinstance(command, say.ReserveBlocks):
                command = talk.reserved()
            if isinstance(command, say.CopyBlocks | say.WarmRequest):
                rounds += 1
                command = talk.copied(1000) if via is Via.KV else talk.reserved()
        assert rounds == MAX_ROUNDS


def test_every_command_of_a_kv_move_is_self_contained() -> None:
    """The destination pulls from this source, these blocks, at this rate, under this lease."""
    talk = Talk(paces=PACES)
    assert (talk.told.worker, talk.migration.via, talk.migration.reason) == (SOURCE, Via.KV, "")
    reserve = talk.describe(10, epoch=3, tokens=100)
    assert (reserve.token_capacity, talk.told.worker) == (100 + HEADROOM_TOKENS, DESTINATION)
    assert talk.told.deadline_s == DEADLINES_S[MoveState.RESERVING]  # no bytes move yet
    copy = talk.reserved()
    assert (copy.source, copy.block_ids, copy.block_epoch) == (SOURCE, (tuple(range(10)),), 3)
    assert (copy.token_capacity, copy.bytes_per_s) == (100 + HEADROOM_TOKENS, 1e6)
    assert talk.told.deadline_s == DEADLINES_S[MoveState.COPYING] + 7.0
    talk.copied(10)
    assert talk.describe(10, epoch=3).via is Via.KV
    attach = talk.hear(say.RequestFrozen)
    assert (attach.source, attach.via, attach.lease) == (SOURCE, Via.KV, 4)
    release = talk.hear(say.RequestAttached, blocks=2, nbytes=20, copy_s=0.25)
    assert isinstance(release, say.ReleaseRequest)
    assert talk.actions[1:] == [HandOver(4)]


def test_a_successful_move_reports_its_cost_and_no_reason() -> None:
    """The figures of the log line and the metrics: copies that had nothing to do are no rounds."""
    talk = Talk()
    talk.describe(10)
    talk.reserved()
    talk.copied(10)
    talk.describe(11 + FEW_BLOCKS)
    talk.copied(1)
    talk.describe(11 + FEW_BLOCKS)
    talk.hear(say.RequestFrozen)
    talk.hear(say.RequestAttached, blocks=0, nbytes=0, copy_s=0.25)
    moved = talk.migration
    assert (moved.rounds, moved.copied_blocks, moved.copied_bytes, moved.copy_s) == (2, 11, 110, 1.25)
    assert (moved.outcome, moved.reason) == (Outcome.COMMITTED, "")
    assert moved.told()[:2] == ("0.0 ms started", "1000.0 ms can go by kv")


@pytest.mark.parametrize(("via", "reason"), [(None, "no room"), (Via.KV, "no room"), (Via.TOKENS, "too long")])
def test_a_request_that_cannot_move_says_why(via: Via | None, reason: str) -> None:
    """For the way that was requested, or the better one; the other is tried only if none was requested."""
    refusals = {Via.KV: "no room", Via.TOKENS: "too long"}
    refused = Talk(via)
    refused.describe(1, refusals=refusals)
    assert (refused.migration.outcome, refused.migration.reason) == (Outcome.REFUSED, reason)
    half = Talk(via)
    half.describe(1, refusals={Via.KV: "no room"})
    assert half.migration.state is (MoveState.ENDED if via is Via.KV else MoveState.WARMING)


def test_the_first_reason_is_reported() -> None:
    """A worker that cannot thaw after a failed copy does not hide why the copy failed."""
    talk = Talk()
    talk.describe(0)
    talk.reserved()
    talk.hear(say.RequestFrozen)
    assert isinstance(talk.hear(say.CopyFailed, reason="bytes are lost"), say.ThawRequest)
    talk.hear(say.CommandFailed, reason="unknown request")
    assert (talk.migration.outcome, talk.migration.reason) == (Outcome.COPY_FAILED, "bytes are lost")
    late = Talk()
    late.migration.happened(Sign.LATE, 6.0)
    assert late.migration.reason == Sign.LATE.value


def test_only_a_late_freeing_command_is_repeated() -> None:
    """The request's end changes nothing about a release in flight; silence does."""
    talk = Talk()
    talk.describe(0)
    talk.reserved()
    talk.hear(say.RequestFrozen)
    talk.hear(say.RequestAttached, blocks=0, nbytes=0, copy_s=0.0)
    assert talk.migration.happened(Sign.GONE, 9.0) == []
    [again] = talk.migration.happened(Sign.LATE, 9.0)
    assert isinstance(again, Tell)
    assert isinstance(again.command, say.ReleaseRequest)


FOLLOWED_S = DEADLINES_S[MoveState.FOLLOWING]


def followed() -> Talk:
    """Return a prompt whose first two blocks are copied."""
    talk = Talk(Via.KV, after=True)
    reserve = talk.describe(2, in_prompt=True, step_s=0.5)
    assert isinstance(reserve, say.ReserveBlocks)
    assert talk.reserved().block_ids == ((0, 1),)
    assert talk.copied(2).beyond == 2
    return talk


def test_each_chunk_of_a_followed_prompt_is_copied() -> None:
    """No limit of rounds, and only the last chunk's blocks are left for later."""
    talk = followed()
    for blocks in range(3, 3 + 2 * MAX_ROUNDS):
        copy = talk.describe(blocks, in_prompt=True)
        assert len(copy.block_ids[0]) == blocks
        follow = talk.copied(1)
        assert (follow.beyond, follow.freeze_after_first_token, talk.told.worker) == (blocks, True, SOURCE)
    assert isinstance(talk.hear(say.RequestFrozen), say.AttachRequest)


def test_a_waiting_prompt_is_followed_for_a_limited_time() -> None:
    """The source's periodic messages are no progress: room at the destination is not held forever."""
    talk = followed()
    began_s, deadline_s = 5.0 + talk.migration.number - 1, talk.told.deadline_s
    assert deadline_s == FOLLOWED_S + 0.5
    assert talk.describe(2, in_prompt=True, step_s=0.25).beyond == 2
    assert talk.told.deadline_s == FOLLOWED_S + 0.25 - (5.0 + talk.migration.number - 1 - began_s)
    [thaw] = talk.migration.happened(Sign.LATE, 30.0)
    assert isinstance(thaw, Tell)
    assert isinstance(thaw.command, say.ThawRequest)
    assert isinstance(talk.hear(say.RequestThawed), say.CancelReservation)


def test_a_preempted_prompt_is_copied_again() -> None:
    """It gets new blocks: the copied ones are worth nothing."""
    talk = followed()
    assert talk.describe(0, epoch=1, in_prompt=True).beyond == 0
    assert talk.describe(1, epoch=1, in_prompt=True).block_epoch == 1


def test_a_prompt_that_ends_between_two_looks_moves_like_any_request() -> None:
    """Its last chunk is copied while it decodes, and only then is it frozen."""
    talk = followed()
    assert isinstance(talk.describe(9), say.CopyBlocks)
    assert talk.copied(7).beyond is None
    assert isinstance(talk.describe(9), say.FreezeRequest)
    begun = Talk(Via.KV, after=True)
    begun.describe(9)
    begun.reserved()
    assert begun.copied(9).beyond is None
