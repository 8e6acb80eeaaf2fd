"""Promises of the door: who may come in, and that nobody can keep the others out."""

import asyncio
import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.api.admission import Admission
from melld.api.answers import Refusal
from melld.api.keys import Keys
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

    for known, let_in in ((1, 10), (2, 5)):
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
        with pytest.raises(TooManyPromptLogprobs, match="are 101, but one call may have 100"):
            first.take_prompt_logprobs(41)
        first.take_prompt_logprobs(40)
        for _ in range(CALLS_AT_ONCE - 1):
            calls.enter_context(called_by(Caller("", account, 100))).take_prompt_logprobs(100)
        with pytest.raises(TooManyPromptLogprobsNow):
            Caller("", account, 100).take_prompt_logprobs(1)
    assert account.in_flight == 0


def test_a_key_is_named_by_its_place_among_the_keys() -> None:
    """What stands in logs and events says nothing about the key."""
    digests = tuple(hashlib.sha256(key).digest() for key in (b"one", b"two"))
    assert [Keys(digests).client_of(key) for key in ("one", "two", "three", None)] == ["key0", "key1", None, None]
    assert Keys().client_of("anything") == ""
