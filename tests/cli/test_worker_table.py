"""A worker's bar: how full it is, and with what."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from melld.cli.worker_table import class_letter, worker_bar
from melld.control.status import RequestStatus, WorkerState, WorkerStatus
from melld.migrate.snapshot import Phase

WORKER = WorkerStatus(
    worker="w0",
    device="cpu:0",
    state=WorkerState.READY,
    capacity_bytes=960,
    used_bytes=720,
    total_blocks=40,
    used_blocks=30,
    reserved_blocks=4,
)


def request(kv_bytes: int, moving_to: str | None = None) -> RequestStatus:
    return RequestStatus(
        request=f"of-{kv_bytes}",
        worker="w0",
        phase=Phase.DECODING,
        prompt_tokens=1,
        age_s=0.0,
        kv_bytes=kv_bytes,
        moving_to=moving_to,
    )


def test_requests_are_grouped_by_class_largest_first() -> None:
    """The bar alone shows what fills a worker, and what is about to leave it."""
    held = [request(72, "w1"), request(24), request(320), request(192)]
    assert worker_bar(WORKER, held, 40, ascii_only=False).plain == "S■■■■■■■■■■■■T■■■■■■■t»»t▪▪▪▪▪□□□□······"
    assert worker_bar(WORKER, held, 40, ascii_only=True).plain == "S############T#######t>>t=====++++......"


def test_shared_blocks_are_shown_once() -> None:
    """Two requests with one long prefix fill only the blocks in use."""
    shared = [request(600), request(600)]
    assert worker_bar(WORKER, shared, 40, ascii_only=True).plain == "L##############L##############++++......"


def test_a_single_small_request_is_visible() -> None:
    """One block in thousands is still somebody's."""
    worker = msgspec.structs.replace(WORKER, used_bytes=24, used_blocks=1, reserved_blocks=0)
    assert worker_bar(worker, [request(24)], 10, ascii_only=True).plain == "t........."


@given(
    st.lists(st.integers(0, 2000), max_size=60),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(1, 60),
)
def test_a_bar_shows_used_cached_and_free(sizes: list[int], total: int, used: int, kept: int, cells: int) -> None:
    """Whatever the requests report, the ledger decides the fill level."""
    worker = msgspec.structs.replace(
        WORKER, total_blocks=total, used_blocks=used, reserved_blocks=kept, capacity_bytes=total * 24
    )
    empty = worker_bar(worker, (), cells, ascii_only=True).plain
    bar = worker_bar(worker, [request(size) for size in sizes], cells, ascii_only=True).plain
    assert len(bar) == len(empty) == cells
    assert [bar.count(mark) for mark in "+."] == [empty.count(mark) for mark in "+."]
    letters = [mark for mark in bar if mark.isalpha()]
    assert letters == sorted(letters, key="LMSTt".index)


def test_letters_follow_mell_s_classes() -> None:
    """Each class includes its upper limit; a request that holds nothing has none."""
    sizes = (0, 1, 120, 121, 240, 241, 320, 321, 480, 481)
    assert [class_letter(size, 960) for size in sizes] == ["", *"ttTTSSMML"]
    assert class_letter(5, 0) == ""
