"""`[targets] itl_ms` on a real daemon with its default policy."""

from pathlib import Path

from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

TOO_FAST_MS = 0.01
STREAMS = 3


def test_a_pace_that_no_worker_gets_wakes_no_further_one(demo_model: Path) -> None:
    """More workers would bring it no nearer: all are served, on one, and the other sleeps on."""
    target = ("--set", f"targets.itl_ms={TOO_FAST_MS}")
    with DaemonProcess(demo_model, "--device", "cpu:2", *target, harmable=True) as daemon:
        operator, streams = Operator(daemon.wait_ready()), []
        with slowed(daemon.faults):
            for _ in range(STREAMS):
                streams.append(Stream(daemon, GREEDY))
                streams[-1].wait_chunks(12)
            workers = [one["worker"] for stream in streams for one in operator.requests_of(stream)]
            others = [worker for worker in operator.status()["workers"] if worker["worker"] not in workers]
        assert len(workers) == STREAMS
        assert [worker["why"].partition(";")[0] for worker in others] == ["not needed"]
        answers = [stream.result() for stream in streams]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0].usage["completion_tokens"] == GREEDY["max_tokens"]
