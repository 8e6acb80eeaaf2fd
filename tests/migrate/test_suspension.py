"""A low request that gives its worker to a high one: its client gets the tokens of an undisturbed run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from melld.cli import main
from tests.decisions.audit import Auditor
from tests.migrate.live import GREEDY, SEEDED, Bench, Stream
from tests.serve.daemon_process import DaemonProcess

BODIES = {"greedy": GREEDY | {"priority": 1}, "seeded": SEEDED | {"priority": 1}}
URGENT = GREEDY | {"priority": -1, "max_tokens": 20}


@pytest.fixture(scope="module")
def lone(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker for one request at a time; its decisions are audited and made again."""
    log = tmp_path_factory.mktemp("suspension") / "decisions.jsonl"
    flags = ["--device", "cpu:1", "--kv-bytes", "64MiB", "--set", f'scheduler.decision_log="{log}"']
    flags += ["--set", "model.vllm.max_num_seqs=1", "--set", "idle.sleep_after_s=inf"]
    flags += ["--set", "health.steady_after_s=0"]
    with DaemonProcess(demo_model, *flags, harmable=True) as daemon:
        yield Bench(daemon.wait_ready(), daemon.faults)
    auditor = Auditor().read(log.read_bytes().splitlines())
    assert auditor.faults == []
    assert auditor.kinds["suspend"] >= len(BODIES)
    assert main(["simulate", "--replay", str(log)]) == 0


def give_way(bench: Bench, name: str, killed: str) -> None:
    """A low stream is suspended, and its worker killed when the test says; both streams end as ever."""
    low_alone, high_alone = (Stream(bench.daemon, body).result() for body in (BODIES[name], URGENT))
    fault = bench.faults / "w0.resumed.KILL"
    with bench.slowed():
        low = Stream(bench.daemon, BODIES[name])
        low.wait_chunks(12)
        high = Stream(bench.daemon, URGENT)
        one = bench.operator.wait_request(lambda found: found["suspensions"])
        assert low.id in one["request"]
        assert (one["worker"], one["suspensions"], high.answer.usage) == (None, 1, None)
        if killed == "after the suspension":
            os.kill(bench.operator.status()["workers"][0]["pid"], signal.SIGKILL)
        elif killed == "after the resumption":
            fault.touch()
        assert high.result() == high_alone
    assert low.result() == low_alone
    assert not fault.exists()
    bench.operator.wait_ready()
    bench.operator.wait_idle()


@pytest.mark.parametrize("killed", ["never", "after the suspension", "after the resumption"])
@pytest.mark.parametrize("name", BODIES)
def test_a_suspended_answer_is_the_answer(lone: Bench, name: str, killed: str) -> None:
    """Wherever it was suspended, and whoever died: no token is lost, none comes twice."""
    give_way(lone, name, killed)
