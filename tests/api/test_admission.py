"""Admission: who may come in, and that nobody can keep the others out."""

import asyncio
import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.admission import RETRY_AFTER, Admission, Door, shutting_down
from melld.api.answers import Answer, Refusal
from melld.api.keys import Client, Keys, load_keys
from melld.config_server import ServerConfig
from melld.engine.frontend.caller import CALLS_AT_ONCE, Caller, LogprobAccount, called_by, caller
from melld.errors import TooManyPromptLogprobs, TooManyPromptLogprobsNow


def test_a_key_s_share_leaves_room_for_one_more_key() -> None:
    """However greedy the current keys are, the next one finds a place; together they may take all places."""
    door = Admission(lambda: 120, lambda: None, lambda: 4)
    assert door.share("key0") == 60
    door._calls_of.update({"key0": 60, "key1": 5})
    assert [door.share(f"key{number}") for number in range(4)] == [40, 40, 30, 30]


@given(st.lists(st.sampled_from("abcd"), max_size=200), st.integers(4, 40))
def test_a_new_key_is_admitted_as_soon_as_a_place_frees_up(clients: list[str], places: int) -> None:
    """Freed places go to the key with fewest, never back to the one with most."""
    door = Admission(lambda: places, lambda: None, lambda: 4)
    for client in clients:
        held = door._calls_of[client]
        if sum(door._calls_of.values()) < places and held < door.share(client):
            door._calls_of[client] += 1
    greedy = max("abcd", key=lambda client: door._calls_of[client])
    missing = [client for client in "abcd" if not door._calls_of[client]]
    if missing and sum(door._calls_of.values()) >= places:
        door._calls_of[greedy] -= 1
        assert door._calls_of[missing[0]] < door.share(missing[0])
        assert door._calls_of[greedy] >= door.share(greedy)


async def test_one_key_cannot_take_every_place() -> None:
    """The second half is reserved for other keys, unless there is only one key."""

    async def hold(door: Admission, client: str, told: asyncio.Queue[int]) -> None:
        try:
            with door.call(client):
                told.put_nowait(200)
                await asyncio.Event().wait()
        except Refusal as refusal:
            told.put_nowait(refusal.answer.status)

    for known, let_in in ((1, 10), (2, 5), (3, 5)):
        door = Admission(lambda: 10, lambda: None, lambda known=known: known)  # type: ignore[misc]
        told: asyncio.Queue[int] = asyncio.Queue()
        tasks = [asyncio.create_task(hold(door, "key0", told)) for _ in range(12)]
        assert sorted([await told.get() for _ in tasks]) == [200] * let_in + [429] * (12 - let_in)
        if known == 2:
            tasks.append(asyncio.create_task(hold(door, "key1", told)))
            assert await told.get() == 200
        door.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert door.in_flight == 0


def test_places_are_shared_among_the_keys_that_hold_some() -> None:
    """A key without calls no longer counts; shares are whole, and at least one."""
    door = Admission(lambda: 11, lambda: None, lambda: 4)
    door._calls_of.update({"key0": 0, "key1": 1})
    assert [door.share("key0"), door.share("key1")] == [3, 5]
    assert Admission(lambda: 2, lambda: None, lambda: 9).share("key0") == 1


async def test_a_draining_daemon_admits_nobody_and_waits_for_running_calls() -> None:
    """Calls go on up to a time limit; aborted ones are not blamed on their clients."""
    door = Admission(lambda: 2, lambda: "no worker is up")
    with pytest.raises(Refusal, match="not accepting requests: no worker is up") as refused:
        door.check()
    assert (refused.value.answer.status, refused.value.answer.headers) == (503, RETRY_AFTER)
    door = Admission(lambda: 2, lambda: None)
    with door.call():
        door.begin_drain()
        assert (door.door, door.why_closed(), door.in_flight) == (Door.DRAINING, "draining", 1)
        with pytest.raises(Refusal, match="not accepting requests: draining"):
            door.check()
        assert not await door.wait_idle(0.0)
        assert (door.aborted, door.abort(), door.aborted) == (False, 1, True)
        door.begin_drain()
        assert door.door is Door.ABORTED  # for good
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
    assert await door.wait_idle(0.0)
    assert shutting_down().answer == Answer(503, "the daemon is shutting down", "shutting_down", headers=RETRY_AFTER)


def called(client: str) -> Caller:
    return Caller(client, LogprobAccount(), 1)


async def test_the_caller_is_known_only_within_its_own_call() -> None:
    """One client's work is never billed to another, even on the same connection."""
    seen: list[str] = []

    async def engine() -> None:
        seen.append(caller().client)

    async def connection(client: str) -> None:
        with called_by(called(client)):
            await asyncio.gather(asyncio.create_task(engine()), engine())
        with pytest.raises(LookupError):
            await engine()

    await asyncio.gather(connection("key0"), connection("key1"))
    assert sorted(seen) == ["key0", "key0", "key1", "key1"]
    with contextlib.suppress(ValueError), called_by(called("key0")):
        raise ValueError
    with pytest.raises(LookupError):
        caller()


def test_prompt_logprobs_are_limited_per_call_and_in_total() -> None:
    """A small request cannot exhaust the memory, and a call's share is released when it ends."""
    account = LogprobAccount()
    with contextlib.ExitStack() as calls:
        first = calls.enter_context(called_by(Caller("", account, 100)))
        first.take_prompt_logprobs(60)
        with pytest.raises(TooManyPromptLogprobs, match="is 101, but one call may have 100"):
            first.take_prompt_logprobs(41)
        first.take_prompt_logprobs(40)
        for _ in range(CALLS_AT_ONCE - 1):
            calls.enter_context(called_by(Caller("", account, 100))).take_prompt_logprobs(100)
        with pytest.raises(TooManyPromptLogprobsNow):
            Caller("", account, 100).take_prompt_logprobs(1)
    assert account.in_flight == 0


def test_a_key_is_named_by_its_position() -> None:
    """Logs and events reveal nothing about the key."""
    keys = load_keys(
        ServerConfig(api_keys=tuple(f"sha256:{hashlib.sha256(key).hexdigest()}" for key in (b"one", b"two")))
    )
    found = [keys.client_of(key) for key in ("one", "two", "three", None)]
    assert [client and client.name for client in found] == ["key0", "key1", None, None]
    assert Keys().client_of("anything") == Client("")
