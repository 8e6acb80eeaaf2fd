"""What the scheduler learns while it runs: growth rates and move times."""

import random

import pytest

from melld.scheduler.growth import GrowthRate
from melld.scheduler.policies.plus.outlook import MoveTimes
from melld.scheduler.state import Request, Worker


def watched(epoch_s: float, tokens_per_s: float, block: int) -> tuple[GrowthRate, Worker]:
    """Return the growth rate and worker after a minute of four requests that grow alike, reported in blocks.

    Five more have prompts that wait: they say nothing.
    """
    worker = Worker("w", 10**9, 100, 0, 0)
    worker.requests = {f"r{number}": Request(f"r{number}", 0, 0, number, decodes=number < 4) for number in range(9)}
    growth = GrowthRate()
    tokens = [float(number) for number in range(4)]
    for epoch in range(int(60 / epoch_s)):
        for number in range(4):
            before, tokens[number] = tokens[number], tokens[number] + tokens_per_s * epoch_s
            grown = int(tokens[number] // block - before // block) * block
            worker.growing += bool(grown)
            worker.grown_bytes += grown
        growth.observe(epoch * epoch_s, [worker])
    return growth, worker


@pytest.mark.parametrize("epoch_s", [0.1, 1.0, 3.0])
def test_the_rate_does_not_depend_on_epoch_or_block_size(epoch_s: float) -> None:
    """Room follows the true speed of decoding, not the frequency of reports."""
    growth, worker = watched(epoch_s, tokens_per_s=25.0, block=16)
    assert pytest.approx(growth.bytes_per_s, rel=0.2) == 25.0
    assert pytest.approx(worker.growth_bytes_s, rel=0.2) == 25.0


def test_the_overall_rate_weighs_requests_not_workers() -> None:
    """A worker with three requests says three times as much as one with one."""
    growth, workers = GrowthRate(), [Worker(name, 10**9, 100, 0, 0) for name in "vw"]
    growth.observe(0.0, workers)
    for worker, count, grown_bytes in zip(workers, (3, 1), (300, 20), strict=True):
        worker.requests = {f"r{number}": Request(f"r{number}", 0, 0, number, decodes=True) for number in range(count)}
        worker.growing, worker.grown_bytes = count, grown_bytes
    growth.observe(2.0, workers)
    assert [worker.growth_bytes_s for worker in workers] == [50.0, 10.0]
    assert growth.bytes_per_s == 40.0


def test_small_rate_changes_do_not_change_the_forecast() -> None:
    """A jitter of the rate does not re-sort ten thousand workers."""
    growth = GrowthRate()
    growth.bytes_per_s = 1000.0
    assert growth.ahead_bytes(2.0) == 2000
    growth.bytes_per_s = 1010.0
    assert growth.ahead_bytes(2.0) == 2000
    growth.bytes_per_s = 1200.0
    assert growth.ahead_bytes(2.0) == 2400
    assert growth.ahead_bytes(0.0) == 0


def test_the_line_through_past_moves_is_fitted() -> None:
    """A large request is sent away as much earlier as it takes longer."""
    moves, chance = MoveTimes(), random.Random(1)
    assert moves.expected_s(1e9) == 0.0
    for _ in range(200):
        kv_bytes = chance.randrange(10**6, 10**9)
        moves.took(kv_bytes, 0.05 + kv_bytes / 4e9)
    assert pytest.approx(moves.expected_s(1e9), rel=0.01) == 0.30
    assert pytest.approx(moves.expected_s(0), abs=0.01) == 0.05


def test_a_slower_link_is_noticed() -> None:
    """Times from before a link became slow are forgotten."""
    moves, chance = MoveTimes(), random.Random(1)
    for rate in (4e9, 1e9):
        for _ in range(300):
            kv_bytes = chance.randrange(10**6, 10**9)
            moves.took(kv_bytes, kv_bytes / rate)
    assert pytest.approx(moves.expected_s(1e9), rel=0.1) == 1.0


def test_a_request_between_two_blocks_counts_as_growing() -> None:
    """Where decoding is slow, most take no block in a second: without them growth would seem many times as fast."""
    growth, worker = watched(0.1, tokens_per_s=2.0, block=16)
    assert pytest.approx(growth.bytes_per_s, rel=0.5) == 2.0
    assert pytest.approx(worker.growth_bytes_s, rel=0.5) == 2.0
