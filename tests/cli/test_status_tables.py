"""The layout of `melld status`, whatever there is to show and however wide the terminal is."""

import io
import itertools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from melld.cli.status_tables import status_view
from melld.control.status import DaemonState, RequestStatus, WorkerState, WorkerStatus
from melld.migrate.snapshot import Phase
from melld.scheduler.priorities import Tier
from tests.cli.plausible import STATUS, TOKENS_ONLY
from tests.effort import examples

names = st.text("abcdefghijklmnopqrstuvwxyz-0123456789", max_size=8).map("w-".__add__)
counts = st.integers(0, 100_000)
sizes = st.integers(0, 1 << 41)
maybe = st.none()

workers = st.builds(
    WorkerStatus,
    worker=names,
    device=st.sampled_from(["cuda:0", "cuda:15", "cpu:3"]),
    device_name=maybe | st.sampled_from(["NVIDIA H200", "NVIDIA GeForce RTX 4090"]),
    state=st.sampled_from(WorkerState),
    reason=st.sampled_from(["", "no answer within 1 s"]),
    capacity_bytes=sizes,
    used_bytes=sizes,
    total_blocks=counts,
    used_blocks=counts,
    reserved_blocks=counts,
    running_requests=st.integers(0, 999),
    waiting_requests=st.integers(0, 99),
    max_requests=st.integers(0, 999),
    tokens_per_s=st.floats(0, 1e6),
    step_ms=maybe | st.floats(0, 1e5),
    memory_bytes=maybe | sizes,
    memory_total_bytes=maybe | sizes,
    power_w=maybe | st.floats(0, 1500),
    temperature_c=maybe | st.integers(0, 120),
    utilisation=maybe | st.floats(0, 1),
)
requests = st.builds(
    RequestStatus,
    request=st.text("0123456789abcdef", min_size=1, max_size=60),
    worker=maybe | names,
    phase=st.sampled_from(Phase),
    tier=st.sampled_from(Tier),
    prompt_tokens=st.integers(0, 10**7),
    output_tokens=st.integers(0, 10**7),
    kv_bytes=sizes,
    age_s=st.floats(-1, 1e7),
    moves=st.integers(0, 99),
)
statuses = st.builds(
    msgspec.structs.replace,
    st.just(STATUS),
    state=st.sampled_from(DaemonState),
    workers=st.lists(workers, max_size=4, unique_by=lambda worker: worker.worker).map(tuple),
    requests=st.lists(requests, max_size=12).map(tuple),
)


def drawn(status, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False, emoji=False, markup=False)
    console.print(status_view(status, console, height))
    return console.file.getvalue().splitlines()


def test_a_starting_daemon_shows_what_is_known() -> None:
    """Unknown capacity before the model is loaded is not zero capacity."""
    starting = (WorkerStatus(worker="w0", device="cpu:0", state=WorkerState.STARTING),)
    status = msgspec.structs.replace(STATUS, state=DaemonState.STARTING, workers=starting, warnings=(), requests=())
    heading, row = drawn(status, 80)[5:7]
    assert heading.split() == ["Worker", "Device", "State", "KV", "Tok/s"]
    assert row.split() == ["w0", "cpu:0", "starting", "·" * 40, "0"]
    status = msgspec.structs.replace(status, workers=(*starting, *STATUS.workers))
    assert drawn(status, 90)[6].split()[3:] == ["··········", "-", "-", "0", "-", "-"]


def test_tiers_are_shown_only_when_they_differ() -> None:
    """Where everybody is equal, the column would only take room."""
    usual = msgspec.structs.replace(STATUS.requests[0], tier=Tier.DEFAULT)
    flex = msgspec.structs.replace(usual, tier=Tier.FLEX)
    for shown, tiers in (((usual,), []), ((usual, flex), ["default", "flex"])):
        table = drawn(msgspec.structs.replace(STATUS, requests=shown), 140)[-len(shown) - 1 :]
        assert [tier for line in table[1:] for tier in Tier if tier in line.split()] == tiers
        assert ("Tier" in table[0].split()) == bool(tiers)


def test_suspensions_and_roles_are_shown_only_when_there_are_any() -> None:
    """How often each request was suspended, the total, and why the workers have their roles."""
    one = msgspec.structs.replace(STATUS.requests[0], suspensions=2)
    busy = msgspec.structs.replace(STATUS, suspensions=5, roles="as configured", requests=(one,))
    *above, head, row = drawn(busy, 140)
    assert (head.split()[-1], row.split()[-1]) == ("Suspended", "2")
    assert sum(line.endswith("2 preemptions, 5 suspensions") for line in above) == 1
    assert "roles: as configured" in above
    assert not {"suspensions", "Suspended", "roles:"} & set(" ".join(drawn(STATUS, 140)).split())


def test_why_a_link_carries_tokens_only_is_shown_once() -> None:
    """Eight GPUs without peer access are 56 links with one reason."""
    assert [line for line in drawn(STATUS, 200) if "tokens only" in line] == [
        f"w1 > w0: tokens only: {TOKENS_ONLY.tokens_only_because}"
    ]
    none = tuple(
        msgspec.structs.replace(TOKENS_ONLY, source=a, destination=b)
        for a, b in itertools.permutations(("w0", "w1", "w2"), 2)
    )
    lines = drawn(msgspec.structs.replace(STATUS, links=none), 200)
    assert [line for line in lines if "tokens only" in line] == [
        f"all links: tokens only: {TOKENS_ONLY.tokens_only_because}"
    ]
    assert "async scheduling: off (set in [model.vllm])" in lines


@settings(max_examples=examples(30), deadline=None)
@given(statuses, st.integers(100, 220))
def test_no_worker_field_is_cut_on_a_usual_terminal(status, width: int) -> None:
    """A number cut in half reads as another number."""
    lines = drawn(status, width)
    assert max(map(len, lines)) <= width
    for worker in status.workers:
        row = next(line for line in lines if line.split()[:1] == [worker.worker])
        assert "…" not in row
        assert f"{worker.tokens_per_s:,.0f}" in row


@settings(max_examples=examples(30), deadline=None)
@given(statuses, st.integers(20, 120), st.integers(25, 50))
def test_the_live_view_fits_its_terminal(status, width: int, height: int) -> None:
    """A view that scrolls cannot be watched: from eighty columns up it keeps to the given height."""
    lines = drawn(status, width, height)
    assert max(map(len, lines)) <= width
    assert width < 80 or len(lines) <= height


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(requests, min_size=1, max_size=30).map(tuple), st.integers(15, 60))
def test_every_request_is_shown_or_counted(shown: tuple[RequestStatus, ...], height: int) -> None:
    """None is silently missing."""
    status = msgspec.structs.replace(STATUS, requests=shown)
    lines = drawn(status, 140, height)
    start = next((index for index, line in enumerate(lines) if line.startswith("Request ")), None)
    if start is None:
        assert lines[-1] == f"{len(shown)} requests"
        return
    rows, last = lines[start + 1 :], lines[-1].split()
    hidden = int(last[1]) if last[0] == "and" else 0
    assert len(rows) - bool(hidden) + hidden == len(shown)
