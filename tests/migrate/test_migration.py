"""The lifecycle of a migration: whatever happens in whatever order, one owner, and nothing left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.errors import IllegalTransition
from melld.migrate import messages as say
from melld.migrate.migration import Migration, MovePace, Tell, Wish
from melld.migrate.snapshot import Via
from melld.migrate.table import DEADLINES_S, TRANSITIONS, MoveState, Outcome, Sign
from tests.effort import examples
from tests.migrate.migration_world import ALL_CHOICES, CHOICES, DESTINATION, LENGTH, REQUEST, SOURCE, World

WAYS = [Via.KV, Via.TOKENS, None]


def play(ahead: int, choices: list[int], via: Via | None) -> World:
    world = World(via)
    world.advance(ahead)
    for choice in choices:
        world.play(choice)
    world.settle()
    return world


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, CHOICES - 1), max_size=60), st.sampled_from(WAYS))
def test_every_history_ends_with_one_owner_and_free_workers(ahead: int, choices: list[int], via: Via | None) -> None:
    """Kills, lost patience, refusals and clients that leave, in any order: no token lost or doubled, nothing held."""
    world = play(ahead, choices, via)
    assert len(world.outcomes) == 1
    assert world.handed_over == (world.outcomes == [Outcome.COMMITTED])
    assert world.finished or world.owner is None
    for worker in world.workers.values():
        assert (worker.copy, worker.room) == (None, False)


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, ALL_CHOICES - 1), max_size=60), st.sampled_from(WAYS))
def test_lost_repeated_and_overtaken_messages_change_nothing(ahead: int, choices: list[int], via: Via | None) -> None:
    """Whatever the wires do to the words of a migration, on top of all else: one owner, and nothing held at the end."""
    world = play(ahead, choices, via)
    assert len(world.outcomes) == 1
    assert world.handed_over == (world.outcomes == [Outcome.COMMITTED])
    for worker in world.workers.values():
        assert (worker.copy, worker.room) == (None, False)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 18), st.lists(st.integers(0, 19), max_size=60), st.sampled_from(WAYS))
def test_without_deaths_the_client_gets_every_token(ahead: int, choices: list[int], via: Via | None) -> None:
    """Refusals and delays may keep a request where it is, and never cost a token."""
    world = play(ahead, choices, via)
    assert world.log == LENGTH


@pytest.mark.parametrize("via", WAYS)
def test_left_alone_it_commits(via: Via | None) -> None:
    """The ordinary case: the request goes on at its destination, and the source is free."""
    world = World(via)
    for _ in range(12):
        for name in (SOURCE, DESTINATION):
            world.obey(name)
            world.hear(name)
    assert world.outcomes == [Outcome.COMMITTED]
    assert (world.owner, world.lease, world.workers[SOURCE].copy) == (DESTINATION, 1, None)


@pytest.mark.parametrize(("state", "sign"), sorted(TRANSITIONS))
def test_every_state_can_be_left_by_every_loss(state: MoveState, sign: Sign) -> None:
    """A death, a deadline or an ended request is never an event that a migration cannot take."""
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
    """A long prompt at a slow rate is not taken for a worker that hangs; a move by KV has a pace of its own."""
    paces = {Via.TOKENS: MovePace(50.0, 400.0), Via.KV: MovePace(1e6, 7.0)}
    wish = Wish(move=1, request=REQUEST, source=SOURCE, destination=DESTINATION, via=Via.TOKENS, lease=1, paces=paces)
    migration = Migration(wish, 0.0)
    migration.happened(Sign.STARTED, 0.0)
    described = say.RequestDescribed(
        move=1, number=1, request=REQUEST, num_tokens=20_000, block_ids=((),), block_epoch=1
    )
    [tell] = migration.answered(described, 0.1)
    assert isinstance(tell, Tell)
    assert (tell.command.tokens_per_s, tell.deadline_s) == (50.0, DEADLINES_S[MoveState.WARMING] + 400.0)


def test_an_answer_to_a_command_that_was_given_up_says_nothing() -> None:
    """A worker that comes back to life after its deadline changes nothing any more."""
    world = World(Via.KV)
    world.obey(SOURCE)
    world.pass_deadline()
    world.hear(SOURCE)
    assert world.outcomes == [Outcome.TIMED_OUT]
