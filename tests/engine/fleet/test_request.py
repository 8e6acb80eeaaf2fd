"""A request's lease, and the deaths that it was present at."""

from hypothesis import given
from hypothesis import strategies as st

from melld.engine.fleet.request import MAX_DEATHS, MAX_HARMS, PROOF_TOKENS, Live
from melld.ids import RequestId, WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")


def live() -> Live:
    return Live(request=RequestId("r"), core_request=b"", prompt_tokens=3, priority=0, arrived_s=0.0, worker=W0)


@given(st.lists(st.sampled_from(["hand over", "called off", "lose"]), max_size=12))
def test_reports_under_an_old_lease_never_count_again(steps: list[str]) -> None:
    """A revived worker or a cancelled move cannot put tokens into the stream."""
    one = live()
    worker, earlier = one.worker, []
    for step in steps:
        if step == "called off":
            earlier.append(one.new_lease())
            continue
        earlier.append(one.lease)
        if step == "lose":
            one.lose_worker(is_suspect=False)
            one.worker = worker
        else:
            one.hand_over(worker or W0, one.new_lease())
    assert one.is_of(W0, one.lease)
    assert not any(one.is_of(W0, lease) for lease in earlier)
    assert not one.is_of(W1, one.lease)


def test_only_received_suspects_are_blamed_for_a_death() -> None:
    """One that had only been written to a wire cannot have killed its reader."""
    one = live()
    one.lose_worker(is_suspect=True)
    one.taken = True
    one.lose_worker(is_suspect=False)
    assert one.deaths == 0
    for _ in range(MAX_DEATHS):
        assert not one.kills_workers
        one.lose_worker(is_suspect=True)
    assert one.kills_workers


def test_external_deaths_are_blamed_only_when_they_repeat() -> None:
    """One needs no trial; but something that ends every worker under it is not fed forever."""
    one = live()
    one.taken = True
    for _ in range(MAX_HARMS):
        assert not one.kills_workers
        one.lose_worker(is_suspect=True, from_outside=True)
    assert one.deaths == 0
    assert one.kills_workers
    one.log([1] * PROOF_TOKENS)
    assert not one.kills_workers


def test_enough_tokens_clear_a_request_of_suspicion() -> None:
    """Deaths hours apart do not add up."""
    one = live()
    one.taken = True
    assert not one.log([1] * 100)
    one.lose_worker(is_suspect=True)
    assert [one.log([1]) for _ in range(PROOF_TOKENS + 1)] == [False] * (PROOF_TOKENS - 1) + [True, False]
    assert one.deaths == 0
