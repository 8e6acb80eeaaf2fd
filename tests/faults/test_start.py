"""One device fails while the others work: the daemon serves with those, says so, and keeps retrying."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.api.http_client import request
from tests.migrate.live import GREEDY, Operator, Stream
from tests.serve.daemon_process import DaemonProcess


def reason_of(daemon: DaemonProcess) -> str:
    """Return what `/ready` answers while it is not."""
    answer = request(daemon.url, "GET", "/ready")
    if answer.status == 200:
        return ""
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    return str(answer.json()["reason"])


def test_a_failing_device_does_not_keep_the_others_from_serving(demo_model: Path, tmp_path: Path) -> None:
    """One broken GPU costs one GPU; `/ready` answers 503 only while no worker at all can serve."""
    (tmp_path / "w1.starting.ABRT").touch()
    with DaemonProcess(
        demo_model, "--device", "cpu:2", "--kv-bytes", "8MiB", environment={"MELLD_FAULTS": str(tmp_path)}
    ) as daemon:
        daemon.wait_for("worker w1 (device cpu:1) exited")
        daemon.wait_ready()
        operator = Operator(daemon)
        assert reason_of(daemon) == ""

        def all_ready(status: Any) -> bool:
            return all(worker["state"] == "ready" for worker in status["workers"])

        operator.wait(all_ready)
        assert [worker["restarts"] for worker in operator.status()["workers"]] == [0, 1]

        for worker in operator.status()["workers"]:
            os.kill(worker["pid"], signal.SIGABRT)
        operator.wait(lambda status: all(worker["state"] == "failed" for worker in status["workers"]))
        assert "no worker can serve: w0 failed, w1 failed" in reason_of(daemon)
        waited = Stream(daemon, {**GREEDY, "max_tokens": 4})
        assert waited.result().error is None, "it came while workers were started again, and waited"
        assert reason_of(daemon) == ""


def test_without_any_worker_the_daemon_ends_with_one_clear_line(demo_model: Path, tmp_path: Path) -> None:
    """Where no device works there is nothing to wait for."""
    for worker in ("w0", "w1"):
        (tmp_path / f"{worker}.starting.ABRT").touch()
    with DaemonProcess(
        demo_model, "--device", "cpu:2", "--kv-bytes", "8MiB", environment={"MELLD_FAULTS": str(tmp_path)}
    ) as daemon:
        assert daemon.wait_end() == 1
    assert daemon.lines[-1].startswith("melld serve: worker w")
    assert daemon.lines[-1].endswith("failed to start: ended by SIGABRT")


def test_without_file_descriptors_the_daemon_says_so_and_ends(demo_model: Path) -> None:
    """A daemon that admits nobody would look as if it served."""
    words = (sys.executable, "-m", "melld", "serve", str(demo_model), "--device", "cpu:1", "--port", "0")
    command = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = "melld serve: the open file limit of 64 is too low to serve clients: raise it to 128 (ulimit -Hn)\n"
    assert (done.returncode, done.stdout + done.stderr) == (1, told)


LATE = """
import os, sys, time
from melld.cli import main
from melld.daemon import lifecycle

def prepare_frontends(parts, prepare=lifecycle.prepare_frontends):
    while not os.path.exists(os.environ["MELLD_PREPARED"]):
        time.sleep(0.01)
    return prepare(parts)

lifecycle.prepare_frontends = prepare_frontends
sys.exit(main(sys.argv[1:]))
"""


def test_a_lone_worker_that_dies_before_serving_is_waited_for(demo_model: Path, tmp_path: Path) -> None:
    """It was ready once, so the model can be served: calls are admitted, and answered once the worker is back."""
    prepared, faults = tmp_path / "prepared", tmp_path / "faults"
    faults.mkdir()
    environment = {"MELLD_PREPARED": str(prepared), "MELLD_FAULTS": str(faults)}
    flags = ["--device", "cpu:1", "--kv-bytes", "8MiB", "--set", "health.ping_timeout_s=120"]
    with DaemonProcess(demo_model, *flags, program=("-c", LATE), environment=environment) as daemon:
        daemon.wait_for("w0 is ready")
        (faults / "w0.starting.STOP").touch()  # the next one begins to load, and goes on when it is told to
        os.kill(daemon.status()["workers"][0]["pid"], signal.SIGABRT)
        daemon.wait_for("worker w0 (device cpu:0) exited")
        prepared.touch()
        daemon.wait_ready()
        operator = Operator(daemon)
        operator.wait(lambda status: status["workers"][0]["pid"] and not list(faults.iterdir()))
        assert "no worker can serve" in reason_of(daemon)
        waiting = Stream(daemon, {**GREEDY, "max_tokens": 4})
        operator.wait(lambda status: status["requests"])
        os.kill(operator.status()["workers"][0]["pid"], signal.SIGCONT)
        assert waiting.result().error is None


def test_a_stop_during_the_start_does_not_wait_for_imports(demo_model: Path, tmp_path: Path) -> None:
    """Stopping or restarting a starting service takes a moment, not as long as a start."""
    flags, environment = ["--device", "cpu:1", "--kv-bytes", "8MiB"], {"MELLD_PREPARED": str(tmp_path / "never")}
    with DaemonProcess(demo_model, *flags, program=("-c", LATE), environment=environment) as daemon:
        daemon.wait_for("w0 is ready")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_end() == 0
    assert daemon.lines[-1] == "melld: stopping"
    assert not (daemon.runtime_directory / "control.sock").exists()
