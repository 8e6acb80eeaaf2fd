"""Which devices `melld run` gets: the cheapest to empty, and never the last in service unless asked for."""

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.control.messages import Lend
from melld.driver.lendable import Lendable, NeverLent, NothingToLend, choose, devices_of
from melld.ids import WorkerId

REASONS = ("", "", "", "drained by an operator")
wanted = functools.partial(Lend, command="train", pid=7, user="ann")


@st.composite
def fleets(draw: st.DrawFn, each: int = 1) -> list[Lendable]:
    """Draw workers of `each` devices, in any state."""
    workers = []
    for number in range(draw(st.integers(1, 5))):
        requests, serves = draw(st.integers(0, 2)), draw(st.booleans())
        workers.append(
            Lendable(
                worker=WorkerId(f"w{number}"),
                devices=tuple(f"cuda:{number * each + index}" for index in range(each)),
                serves=serves,
                is_awake=draw(st.booleans()),
                requests=requests if serves else 0,
                kv_bytes=draw(st.integers(1, 3)) if requests and serves else 0,
                taken=draw(st.sampled_from(REASONS)),
            )
        )
    return workers


def cost(worker: Lendable) -> tuple[bool, int, bool]:
    return worker.requests > 0, worker.kv_bytes, worker.is_awake


def allowed(workers: Sequence[Lendable], lent: Sequence[Lendable], even_last: bool) -> bool:
    """Return True if lending these keeps the promises, derived independently."""
    left = [one for one in workers if one.serves and one not in lent]
    return not any(one.taken for one in lent) and (even_last or bool(left))


@given(fleets(), st.integers(1, 5), st.booleans())
def test_the_cheapest_permissible_devices_are_lent(workers: list[Lendable], count: int, even_last: bool) -> None:
    """No equally large choice that keeps a worker in service is cheaper to empty."""
    possible = [lent for lent in itertools.combinations(workers, count) if allowed(workers, lent, even_last)]
    try:
        chosen = choose(workers, wanted(count=count, even_last=even_last))
    except NeverLent:
        assert count > len(workers) or (count == len(workers) and not even_last)
    except NothingToLend:
        assert not possible
    else:
        assert allowed(workers, chosen, even_last)
        assert len(devices_of(chosen)) == count
        best = min(sorted(map(cost, lent)) for lent in possible)
        assert sorted(map(cost, chosen)) == best


@given(fleets(each=2), st.integers(1, 10), st.booleans())
def test_a_worker_s_devices_are_lent_together(workers: list[Lendable], count: int, even_last: bool) -> None:
    """Half of a tensor-parallel worker cannot serve: its other device would be idle, and still full."""
    try:
        chosen = choose(workers, wanted(count=count, even_last=even_last))
    except (NeverLent, NothingToLend):
        return
    assert allowed(workers, chosen, even_last)
    assert count <= len(devices_of(chosen)) <= count + 1


@given(fleets(), st.sets(st.integers(0, 5), min_size=1), st.booleans())
def test_named_devices_are_lent_or_none(workers: list[Lendable], indices: set[int], even_last: bool) -> None:
    """No other device will do."""
    named = tuple(f"cuda:{index}" for index in sorted(indices))
    meant = [one for one in workers if set(one.devices) & set(named)]
    try:
        chosen = choose(workers, wanted(devices=named, even_last=even_last))
    except NeverLent:
        assert not set(named) <= set(devices_of(workers))
    except NothingToLend:
        assert not allowed(workers, meant, even_last)
    else:
        assert set(chosen) == set(meant)
        assert allowed(workers, chosen, even_last)


def worker(name: str, *devices: str, taken: str = "") -> Lendable:
    return Lendable(WorkerId(name), devices, serves=not taken, is_awake=True, requests=0, kv_bytes=0, taken=taken)


def test_workers_that_share_a_device_are_emptied_together() -> None:
    """The device is free only when the last of them has gone."""
    shared = [worker("w0", "cuda:0"), worker("w1", "cuda:1"), worker("w2", "cuda:1")]
    assert [one.worker for one in choose(shared, wanted(devices=("cuda:1",)))] == ["w1", "w2"]


def test_no_model_loses_the_last_worker_that_it_has_awake() -> None:
    """Its requests would wait, though another model is served; what rests elsewhere can be woken."""
    a0, a1 = (worker(f"a{index}", f"cpu:{index}")._replace(model="a") for index in range(2))
    b0, b1 = (worker(f"b{index}", f"cpu:{index}")._replace(model="b") for index in range(2))
    away = {"serves": False, "is_awake": False}
    assert choose([a0, a1, b0, b1], wanted()) == (a1, b1)
    assert choose([a0, a1, b0, b1._replace(**away)], wanted()) == (a1, b1._replace(**away))
    with pytest.raises(NothingToLend, match=r"without a0, b0 no worker.*; without a1, b1 no worker"):
        choose([a0, a1._replace(**away), b0._replace(**away), b1], wanted())


def test_of_equals_the_last_is_lent() -> None:
    """The scheduler packs requests on the first ones."""
    assert [one.worker for one in choose([worker("w0", "cpu:0"), worker("w1", "cpu:1")], wanted())] == ["w1"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            wanted(),
            "of 1 device wanted 0 can be lent: without w0 no worker would be left in service (use --all to lend it "
            "too); cpu:1 is lent",
        ),
        (wanted(devices=("cpu:1",)), "of 1 device wanted 0 can be lent: cpu:1 is lent"),
        (wanted(devices=("cpu:7",)), "no device 'cpu:7'; available: cpu:0, cpu:1"),
        (wanted(count=3), "only 2 devices exist, not 3"),
        (wanted(count=2), "2 is all devices, and one must stay in service: use --all to lend it too"),
    ],
)
def test_a_refusal_gives_the_reason(asked: Lend, says: str) -> None:
    """A borrower knows at once whether to wait or to change the command line."""
    with pytest.raises((NothingToLend, NeverLent)) as refused:
        choose([worker("w0", "cpu:0"), worker("w1", "cpu:1", taken="lent")], asked)
    assert str(refused.value) == says
