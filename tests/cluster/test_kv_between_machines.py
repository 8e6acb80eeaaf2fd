"""KV between machines by NIXL: moved requests continue exactly, even if a machine's worker dies half-way."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.errors import MelldError
from tests.cluster.ray_nodes import RayNodes
from tests.migrate.live import CASES, GREEDY, LONG, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess

pytest.importorskip("nixl", reason="NIXL is not installed: locks/nixl.txt")
pytestmark = pytest.mark.long
LARGE = GREEDY | {"messages": LONG, "max_tokens": 150}
"""Its KV takes many seconds over the link, which is limited."""


class Bench:
    """A daemon with a worker on each of two machines."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.operator = Operator(daemon)

    def beginning(self, body: dict[str, Any]) -> tuple[Stream, Any]:
        """Return a stream that has begun, and its request's status."""
        stream = Stream(self.daemon, body)
        stream.wait_chunks(12)
        [request] = self.operator.requests_of(stream)
        return stream, request

    def move(self, request: Any, via: str = "kv") -> Any:
        return self.operator.migrate(request["request"], "w1" if request["worker"] == "w0" else "w0", via)

    def kill(self, worker: str) -> None:
        [pid] = [one["pid"] for one in self.operator.status()["workers"] if one["worker"] == worker]
        os.kill(pid, signal.SIGKILL)

    def wait_linked(self, more: int) -> None:
        """Wait until so many more links have opened."""
        for _ in range(more):
            self.daemon.wait_for(" by nixl")


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[None]:
    """Disable the ways that UCX has between processes of one machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def bench(over_tcp: None, nodes: RayNodes, demo_model: Path) -> Iterator[Bench]:
    flags = ["--cluster", nodes.address, "--device", "cpu", "--set", "cluster.min_machines=2"]
    flags += ["--set", 'cluster.kv="nixl"', "--set", 'cluster.kv_interface="lo"', "--set", "idle.sleep_after_s=inf"]
    flags += ["--set", 'scheduler.policy="most-free"', "--set", "health.steady_after_s=0"]
    flags += ["--set", 'migration.link_bytes_per_s="256KiB"']
    with DaemonProcess(demo_model, *flags) as daemon:
        daemon.wait_ready()
        made = Bench(daemon)
        made.operator.wait_ready()
        made.wait_linked(2)
        yield made


@pytest.mark.parametrize("case", ["greedy", "seeded", "penalties", "logprobs"])
def test_kv_moves_to_another_machine(bench: Bench, case: str) -> None:
    """The answer is the same as without a move."""
    unmoved = Stream(bench.daemon, CASES[case]).result()
    stream, request = bench.beginning(CASES[case])
    there = bench.move(request)
    assert (there["outcome"], there["via"]) == ("committed", "kv"), there
    assert there["copied_bytes"] > 0
    assert stream.result() == unmoved


@pytest.mark.parametrize("dies", ["source", "destination"])
def test_a_worker_that_dies_during_a_pull_harms_no_answer(bench: Bench, dies: str) -> None:
    """The link is slow enough to be interrupted; the request resumes from its tokens, or stays where it was."""
    unmoved = Stream(bench.daemon, LARGE).result()
    stream, request = bench.beginning(LARGE | {"cache_salt": dies})  # its blocks are not there already
    reports: list[Any] = []

    def move() -> None:
        with contextlib.suppress(MelldError):
            reports.append(bench.move(request))

    moving = threading.Thread(target=move)
    moving.start()
    other = "w1" if request["worker"] == "w0" else "w0"
    bench.operator.wait(lambda status: any(one["reserved_blocks"] for one in status["workers"]))
    stream.wait_chunks(len(stream.arrivals_s) + 4)
    bench.kill(request["worker"] if dies == "source" else other)
    moving.join(PATIENCE_S)
    assert not moving.is_alive()
    assert [one["outcome"] for one in reports] != ["committed"]
    assert stream.result() == unmoved
    bench.operator.wait_ready()
    bench.wait_linked(2)
    bench.operator.wait_idle()
