"""`[targets] itl_ms` on a real daemon with its default policy: what one worker cannot pace gets another."""

from pathlib import Path

from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import SLOW_STEP_S, slowed

PLENTY = {**GREEDY, "max_tokens": 240}
DECODE_S = 0.1
TARGET_MS = 1e3 * (SLOW_STEP_S + 1.5 * DECODE_S)
"""A worker keeps it with one request, and not with two."""


def test_a_request_goes_where_the_pace_is_kept(demo_model: Path) -> None:
    """A worker has room for hundreds; once two were seen to be too slow on one, the third has the other to itself."""
    target = ("--set", f"targets.itl_ms={TARGET_MS}")
    with DaemonProcess(demo_model, "--device", "cpu:2", *target, harmable=True) as daemon:
        operator, streams = Operator(daemon.wait_ready()), []
        with slowed(daemon.faults, DECODE_S):
            for _ in range(3):
                streams.append(Stream(daemon, PLENTY))
                streams[-1].wait_chunks(12)
            first, second, third = [one["worker"] for stream in streams for one in operator.requests_of(stream)]
        assert first == second, "nothing was known to speak against it, and a GPU slept on"
        assert third != first
        answers = [stream.result() for stream in streams]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0].usage["completion_tokens"] == PLENTY["max_tokens"]
