"""How urgent a request is: from its number, its tier and its client's rights; anything else is an error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from melld.api.answers import Refusal
from melld.api.guards.tiers import Rights, priority_of, rights_of
from melld.api.keys import Client
from melld.config_values import MOST_PRIORITY
from tests.api.guards.test_work import in_every_type

LOW, HIGH = Rights(1, 0), Rights(-1, -5)


def refused(body: dict[str, Any], rights: Rights = LOW) -> tuple[str | None, str]:
    with pytest.raises(Refusal) as found:
        priority_of(body, rights)
    return found.value.answer.param, found.value.answer.message


@pytest.mark.parametrize(
    ("tier", "with_no_limit", "high", "low"),
    [
        (None, 0, -1, 1),
        ("auto", 0, -1, 1),
        ("scale", 0, -1, 1),
        ("priority", -1, -1, 1),
        ("fast", -1, -1, 1),
        ("default", 0, 0, 0),
        ("standard_only", 0, 0, 0),
        ("flex", 1, 1, 1),
    ],
)
def test_a_tier_is_granted_only_within_the_client_s_rights(
    tier: str | None, with_no_limit: int, high: int, low: int
) -> None:
    """A tier beyond them is ignored: the request gets the client's default."""
    body = {"service_tier": tier}
    assert [priority_of(body, rights) for rights in (Rights(), HIGH, LOW)] == [with_no_limit, high, low]
    assert priority_of({}, LOW) == 1


@pytest.mark.parametrize(
    ("client", "rights"),
    [
        (Client(), (Rights(0, None), Rights(0, 0), Rights(2, 2))),
        (Client("", -1), (Rights(-1, None), Rights(-1, -1), Rights(-1, -1))),
        (Client("", 3), (Rights(3, None), Rights(3, 0), Rights(3, 2))),
        (Client("", None, 1), (Rights(1, 1),) * 3),
        (Client("", 1, -2), (Rights(1, -2),) * 3),
    ],
)
def test_a_client_s_own_rights_override_the_general_ones(client: Client, rights: tuple[Rights, ...]) -> None:
    """The default of a client's requests never exceeds what the client may ask for."""
    assert tuple(rights_of(client, least) for least in (None, 0, 2)) == rights


def test_a_number_overrides_a_tier() -> None:
    """Whoever gives both means the finer one."""
    assert priority_of({"priority": 3, "service_tier": "priority"}, Rights()) == 3
    assert priority_of({"priority": -3, "service_tier": "flex"}, HIGH) == -3


@given(st.integers(-2 * MOST_PRIORITY, 2 * MOST_PRIORITY) | st.integers(-(2**53), 2**53))
def test_a_priority_counts_however_it_is_written(number: int) -> None:
    """`5.0` is 5 to vLLM, so it is 5 to the limit; out of range or beyond the rights is an error."""
    for text in in_every_type(number):
        try:
            TypeAdapter(int).validate_json(text)
        except ValidationError:
            continue
        body = json.loads(f'{{"priority": {text}}}')
        if abs(number) > MOST_PRIORITY:
            assert refused(body) == ("priority", "priority must be a whole number from -100 to 100: lower goes first")
        elif number < 0:
            assert refused(body) == ("priority", "priority must be 0 or more here: lower goes first")
        else:
            assert priority_of(body, LOW) == number


@pytest.mark.parametrize("value", [5.5, "five", None, [], {}, 10**400])
def test_a_priority_that_is_no_number_is_an_error(value: Any) -> None:
    """It is never read as the least urgent, nor as the most."""
    assert refused({"priority": value})[0] == "priority"


@pytest.mark.parametrize("value", ["swift", "", "Priority", 1, True, [], {}])
def test_an_unknown_tier_is_an_error_that_lists_all_tiers(value: Any) -> None:
    """Even beside a number, so that typos are noticed."""
    said = "service_tier must be one of priority, fast, default, standard_only, flex, auto, scale"
    assert refused({"service_tier": value, "priority": 1}) == ("service_tier", said)
