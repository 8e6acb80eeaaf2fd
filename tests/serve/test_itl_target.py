"""`[targets] itl_ms` on a real daemon: requests that one worker cannot pace are spread, whatever memory it has."""

from pathlib import Path

from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess

PLENTY = {**GREEDY, "max_tokens": 2000, "ignore_eos": True}
TOO_FAST_MS = "0.01"


def both_on_one(operator: Operator, streams: list[Stream]) -> bool:
    """Whether the two requests are on the same worker."""
    workers = [one["worker"] for stream in streams for one in operator.requests_of(stream)]
    assert len(workers) == len(streams)
    return len(set(workers)) == 1


def test_requests_leave_a_worker_whose_steps_are_too_slow(demo_model: Path) -> None:
    """Packing puts both on one worker; with a target that no step keeps, one of them moves away and stays away."""
    apart, together = [], []
    for seen, flags in ((together, ()), (apart, ("--set", f"targets.itl_ms={TOO_FAST_MS}"))):
        with DaemonProcess(demo_model, "--device", "cpu:2", *flags) as daemon:
            operator = Operator(daemon.wait_ready())
            streams = [Stream(daemon, PLENTY) for _ in range(2)]
            for stream in streams:
                stream.wait_chunks(200)
            if flags:
                home = operator.status()["requests"][0]["worker"]
                operator.wait_request(lambda one, home=home: one["worker"] != home)
            seen.append(both_on_one(operator, streams))
            for stream in streams:
                stream.wait_chunks(600)
            seen.append(both_on_one(operator, streams))
            answers = [stream.result() for stream in streams]
            assert answers[0] == answers[1]
            assert answers[0].usage["completion_tokens"] == PLENTY["max_tokens"]
    assert together == [True, True]
    assert apart == [False, False]
