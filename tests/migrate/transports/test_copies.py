"""Copies on their own thread: in order, cancellable, each with exactly one outcome."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from melld.migrate.transports.copies import Copies, CopyDone
from melld.migrate.transports.layout import layout_of
from melld.migrate.transports.shared_memory import SharedMemoryLink
from melld.migrate.transports.transport import Puller, Wait
from tests.migrate.transports.sibling import BLOCKS, fill, make_cache
from tests.patience import PATIENCE_S


class CompilationFailed(Exception):
    """Error like a compiler's: neither ours nor torch's (triton.compiler.errors.CompilationError)."""


class GatedLink(SharedMemoryLink):
    """A link between two caches of this process whose every piece waits to be released."""

    gate: threading.Semaphore
    failure: Exception | None = None

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        assert self.gate.acquire(timeout=PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return super().begin(source_blocks, destination_blocks)


class Bench:
    """A gated link, its copies, and their outcomes."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.source, self.target = make_cache(), make_cache()
        fill(self.source)
        regions = [torch.empty(0, dtype=torch.uint8).set_(t[0].untyped_storage()) for t in (self.source, self.target)]
        layout = layout_of(self.source, BLOCKS)
        self.link = GatedLink(regions[0], layout, regions[1], layout)
        self.link.gate = threading.Semaphore(0)
        self.heard: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
        self.copies = Copies(Puller(self.link, bytes_per_s=bytes_per_s, piece_bytes=1), self.heard.put, "bench")

    def let(self, pieces: int) -> None:
        self.link.gate.release(pieces)

    def hear(self) -> CopyDone:
        return self.heard.get(timeout=PATIENCE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.let(100)
    bench.copies.close()
    assert bench.heard.empty(), "a job ended twice"


def test_jobs_end_in_order(bench: Bench) -> None:
    """A link carries one copy at a time; none is forgotten, none overtakes."""
    bench.copies.submit("a", [1, 2], [3, 4])
    bench.copies.submit("b", [5], [6])
    bench.let(3)
    assert [bench.hear().job, bench.hear().job] == ["a", "b"]
    for mine, theirs in zip(bench.target, bench.source, strict=True):
        assert torch.equal(mine[[3, 4, 6]], theirs[[1, 2, 5]])


def test_a_frozen_request_s_copy_goes_between_two_pieces(bench: Bench) -> None:
    """A client whose request is frozen does not wait for another's long copy."""
    bench.copies.submit("long", [1, 2, 3], [1, 2, 3])
    bench.let(1)
    bench.copies.submit("urgent", [4], [4], urgent=True)
    bench.let(1)
    bench.let(5)
    assert [bench.hear().job, bench.hear().job] == ["urgent", "long"]


def test_a_rate_limited_job_holds_nobody_up() -> None:
    """What urgent copies have used up of a limited link delays neither the next urgent one nor a cancellation."""
    bench = Bench(bytes_per_s=1.0)
    bench.let(100)
    bench.copies.submit("long", [1, 2, 3], [1, 2, 3], urgent=True)
    assert bench.hear().job == "long"
    bench.copies.submit("paced", [4], [4])
    bench.copies.submit("urgent", [5], [5], urgent=True)
    assert bench.hear().job == "urgent"
    bench.copies.cancel("paced")
    assert (bench.hear().job, bench.target[0][4].any()) == ("paced", False)
    bench.copies.close()


def test_a_cancelled_job_writes_no_further_piece(bench: Bench) -> None:
    """A cancelled move returns its link and its blocks at the next piece, not at the end."""
    bench.copies.submit("a", [1, 2, 3], [1, 2, 3])
    bench.copies.submit("never begun", [4], [4])
    bench.copies.cancel("never begun")
    bench.let(1)
    bench.copies.cancel("a")
    bench.let(1)
    first, second = bench.hear(), bench.hear()
    assert (first.job, first.cancelled, first.pulled) == ("a", True, None)
    assert (second.job, second.cancelled) == ("never begun", True)
    assert not any(tensor[[3, 4]].any() for tensor in bench.target)


@pytest.mark.parametrize(
    ("spoil", "blocks"),
    [
        (lambda _: None, [BLOCKS]),
        (lambda link: setattr(link, "failure", RuntimeError("the device is lost")), [1]),
        (lambda link: setattr(link, "failure", CompilationFailed("no such instruction")), [1]),
    ],
    ids=["a wrong block", "a lost device", "a compiler's own exception"],
)
def test_a_failed_job_says_why_and_the_next_one_runs(
    bench: Bench, spoil: Callable[[GatedLink], None], blocks: list[int]
) -> None:
    """One bad copy ends one move; the link serves the others."""
    spoil(bench.link)
    bench.let(1)
    bench.copies.submit("bad", blocks, [1])
    failed = bench.hear()
    assert failed.failure
    assert failed.pulled is None
    bench.link.failure = None
    bench.let(1)
    bench.copies.submit("good", [2], [2])
    assert bench.hear().pulled is not None


def test_closing_ends_every_job(bench: Bench) -> None:
    """A worker that stops leaves no move without an answer."""
    other = Bench()
    other.copies.submit("a", [1, 2], [1, 2])
    other.copies.submit("b", [3], [3])
    other.let(10)
    other.copies.close()
    assert {other.hear().job, other.hear().job} == {"a", "b"}


def test_a_copy_over_a_closed_link_ends_at_once(bench: Bench) -> None:
    """A sibling dies while its link is in use: a further copy must not wait indefinitely."""
    bench.copies.close()
    bench.copies.submit("late", [0], [1])
    assert bench.hear() == CopyDone("late", cancelled=True)
    bench.copies.submit("late", [0], [1], urgent=True)
    assert bench.hear() == CopyDone("late", cancelled=True)
