"""A request's lease, and the deaths that it was there at."""

from hypothesis import given
from hypothesis import strategies as st

from melld.engine.fleet.request import MAX_DEATHS, MAX_HARMS, PROOF_TOKENS, Live
from melld.ids import RequestId, WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")


def live() -> Live:
    return Live(request=RequestId("r"), core_request=b"", prompt_tokens=3, priority=0, arrived_s=0.0, worker=W0)


@given(st.lists(st.sampled_from(["hand over", "called off", "lose"]), max_size=12))
def test_what_a_worker_said_before_it_was_left_never_counts_again(steps: list[str]) -> None:
    """A worker that comes back from the dead, or a move that was called off, cannot put tokens into the stream."""
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


def test_only_suspects_that_were_taken_bear_a_death() -> None:
    """One that had only been written to a wire cannot have killed whoever was to read it."""
    one = live()
    one.lose_worker(is_suspect=True)
    one.taken = True
    one.lose_worker(is_suspect=False)
    assert one.deaths == 0
    for _ in range(MAX_DEATHS):
        assert not one.kills_workers
        one.lose_worker(is_suspect=True)
    assert one.kills_workers


def test_deaths_from_outside_are_not_its_doing_until_they_are_many() -> None:
    """It needs no trial after one; but something that ends every worker under it is not fed for ever."""
    one = live()
    one.taken = True
    for _ in range(MAX_HARMS):
        assert not one.kills_workers
        one.lose_worker(is_suspect=True, from_outside=True)
    assert one.deaths == 0
    assert one.kills_workers
    one.log([1] * PROOF_TOKENS)
    assert not one.kills_workers


def test_enough_tokens_acquit_it_once() -> None:
    """Deaths hours apart do not add up."""
    one = live()
    one.taken = True
    assert not one.log([1] * 100)
    one.lose_worker(is_suspect=True)
    assert [one.log([1]) for _ in range(PROOF_TOKENS + 1)] == [False] * (PROOF_TOKENS - 1) + [True, False]
    assert one.deaths == 0
