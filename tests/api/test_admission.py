"""Promises of the door: who may come in, and that nobody can keep the others out."""

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


def test_the_share_of_a_key_leaves_room_for_one_more() -> None:
    """However greedy the keys are that call now, the next one finds a place; all keys together may take all places."""
    door = Admission(lambda: 120, lambda: None, lambda: 4)
    assert door.share("key0") == 60
    door._calls_of.update({"key0": 60, "key1": 5})
    assert [door.share(f"key{number}") for number in range(4)] == [40, 40, 30, 30]


@given(st.lists(st.sampled_from("abcd"), max_size=200), st.integers(4, 40))
def test_a_key_that_calls_for_the_first_time_is_let_in_when_others_have_left(clients: list[str], places: int) -> None:
    """Every place that becomes free goes to who has fewer, never back to who has most."""
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
    """The second half of the places waits for somebody else; with a single key there is nobody else."""

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


def test_the_places_are_shared_in_whole_among_those_who_hold_some() -> None:
    """Who has ended all its calls counts no more; a place is never halved, and everybody may have one."""
    door = Admission(lambda: 11, lambda: None, lambda: 4)
    door._calls_of.update({"key0": 0, "key1": 1})
    assert [door.share("key0"), door.share("key1")] == [3, 5]
    assert Admission(lambda: 2, lambda: None, lambda: 9).share("key0") == 1


async def test_a_daemon_that_drains_lets_nobody_in_and_waits_for_those_inside() -> None:
    """Calls go on while it drains, up to a limit of time; those that are aborted then are no client's doing."""
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


async def test_a_caller_is_known_in_its_own_call_alone() -> None:
    """One client's work is never put to another's account, not even on one connection."""
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


def test_logprobs_of_prompts_are_limited_in_a_call_and_among_calls() -> None:
    """A small request cannot take the machine's memory, and what a call has taken is free when it ends."""
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


def test_a_key_is_named_by_its_place_among_the_keys() -> None:
    """What stands in logs and events says nothing about the key."""
    keys = load_keys(
        ServerConfig(api_keys=tuple(f"sha256:{hashlib.sha256(key).hexdigest()}" for key in (b"one", b"two")))
    )
    found = [keys.client_of(key) for key in ("one", "two", "three", None)]
    assert [client and client.name for client in found] == ["key0", "key1", None, None]
    assert Keys().client_of("anything") == Client("")
