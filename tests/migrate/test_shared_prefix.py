"""Chats with a common beginning: vLLM keeps it once, and melld counts it once."""

from melld.kvstore.geometry import KvGeometry
from tests.migrate.live import Bench, Stream

SYSTEM_PROMPT = [5 + place * 7 % 1900 for place in range(3200)]
CHATS = 11


def preemptions(bench: Bench) -> str:
    [line] = [line for line in bench.daemon.get("/metrics").splitlines() if line.startswith("melld_preemptions_total{")]
    return line


def test_chats_with_one_long_system_prompt_run_at_once(bench: Bench) -> None:
    """Counted in full they would exceed both workers; none waits for another's end, none is preempted."""
    before = preemptions(bench)
    streams = []
    with bench.slowed():
        for number in range(CHATS):
            prompt = [*SYSTEM_PROMPT, 100 + number]
            streams.append(Stream(bench.daemon, {"prompt": prompt, "max_tokens": 2500, "ignore_eos": True}))
            streams[-1].wait_chunks(2)
        status = bench.operator.status()
    assert (len(status["requests"]), status["queued_requests"]) == (CHATS, 0)
    worker = status["workers"][0]
    block = KvGeometry(block_tokens=32, block_bytes=worker["capacity_bytes"] // worker["total_blocks"])
    assert CHATS * block.bytes_for_tokens(len(SYSTEM_PROMPT)) > sum(one["capacity_bytes"] for one in status["workers"])
    assert preemptions(bench) == before
    for stream in streams:
        stream.leave()
    bench.operator.wait_idle()
