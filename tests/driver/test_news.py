"""What the scheduler hears about requests that wait on their workers without a block."""

import pytest

from melld.ids import RequestId
from melld.migrate.snapshot import Phase
from tests.serve.offline_daemon import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, OfflineDaemon


@pytest.fixture
async def daemon() -> OfflineDaemon:
    return OfflineDaemon()


def reported(daemon: OfflineDaemon, request: RequestId, blocks: int, phase: Phase) -> None:
    worker = daemon.where(request)
    daemon.fleet.ledger.blocks_changed(worker, (blocks, BLOCKS, 0), {request: (blocks, phase)})


def counted_blocks(daemon: OfflineDaemon, request: RequestId) -> int:
    daemon.driver.news.tell()
    return daemon.scheduler.cluster.requests[request].kv_bytes // BLOCK_BYTES


async def test_a_preempted_request_counts_with_all_it_needs_to_resume(daemon: OfflineDaemon) -> None:
    """It was preempted because it grew since the last epoch; counted as before, it might wait forever."""
    request = daemon.admit("r", 2)
    assert counted_blocks(daemon, request) == 2
    daemon.fleet.live[request].output_token_ids += [7] * 3 * BLOCK_TOKENS
    reported(daemon, request, 0, Phase.WAITING)
    assert counted_blocks(daemon, request) == 5
    assert daemon.driver.news.preemptions == 1
    reported(daemon, request, 3, Phase.PREFILLING)
    assert counted_blocks(daemon, request) == 5, "it will need these again"


async def test_a_resumed_request_in_the_queue_counts_with_all_its_tokens(daemon: OfflineDaemon) -> None:
    """Its last worker may have died before it reported the last growth."""
    request = daemon.admit("r", 2)
    daemon.fleet.live[request].output_token_ids += [7] * 3 * BLOCK_TOKENS
    worker = daemon.where(request)
    daemon.fleet.ledger.blocks_changed(worker, (0, BLOCKS, 0), {}, gone=[request])
    reported(daemon, request, 0, Phase.WAITING)
    assert counted_blocks(daemon, request) == 5
