"""A device that fails while the others work: it serves with those, says so, and goes on trying."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.api.http_client import request
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess


def reason_of(daemon: DaemonProcess) -> str:
    """What `/ready` answers while it is not."""
    answer = request(daemon.url, "GET", "/ready")
    if answer.status == 200:
        return ""
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    return str(answer.json()["reason"])


def test_a_device_that_fails_does_not_keep_the_others_from_serving(demo_model: Path, tmp_path: Path) -> None:
    """One broken GPU costs one GPU; `/ready` answers 503 only while no worker at all can serve."""
    (tmp_path / "w1.starting.ABRT").touch()
    with DaemonProcess(
        demo_model, "--device", "cpu:2", "--kv-bytes", "8MiB", environment={"MELLD_FAULTS": str(tmp_path)}
    ) as daemon:
        daemon.wait_for("melld: ready")
        assert daemon.wait_for("without w1 on cpu:1").endswith("starts again in 1 s")
        daemon.url = daemon.wait_for("/v1").split()[-1].removesuffix("/v1")
        operator = Operator(daemon)
        assert reason_of(daemon) == ""

        def all_ready(status: Any) -> bool:
            return all(worker["state"] == "ready" for worker in status["workers"])

        operator.wait(all_ready, 60)
        assert [worker["restarts"] for worker in operator.status()["workers"]] == [0, 1]

        for worker in operator.status()["workers"]:
            os.kill(worker["pid"], signal.SIGABRT)
        operator.wait(lambda status: all(worker["state"] == "failed" for worker in status["workers"]), 60)
        assert "no worker can serve: w0 failed, w1 failed" in reason_of(daemon)
        waited = Stream(daemon, {**GREEDY, "max_tokens": 4})
        assert waited.result().error is None, "it came while workers were started again, and waited"
        assert reason_of(daemon) == ""


def test_without_any_worker_it_ends_with_one_clear_line(demo_model: Path, tmp_path: Path) -> None:
    """Where no device works there is nothing to wait for."""
    for worker in ("w0", "w1"):
        (tmp_path / f"{worker}.starting.ABRT").touch()
    with DaemonProcess(
        demo_model, "--device", "cpu:2", "--kv-bytes", "8MiB", environment={"MELLD_FAULTS": str(tmp_path)}
    ) as daemon:
        assert daemon.wait_end(150.0) == 1
    assert daemon.lines[-1].startswith("melld serve: worker w")
    assert daemon.lines[-1].endswith("could not start: ended by SIGABRT")
