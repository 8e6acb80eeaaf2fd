"""Processes that hang where no ping reaches: nobody waits for them forever, and nobody else pays for it."""

import os
import shutil
import signal
from pathlib import Path

from melld.engine.host.fate import is_stopped
from tests.faults.checker import Subject
from tests.faults.conftest import SILENCE_S
from tests.faults.test_workers_harmed import body, parent, two_on
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed


def test_a_stopped_template_hides_no_death_and_blocks_no_start(subject: Subject) -> None:
    """The dead worker restarts once melld has continued the template; the other, and its stream, feel nothing."""
    bodies = [body(seed=1), body(seed=2)]
    for one in bodies:
        subject.unharmed(one)
    with slowed(subject.faults):
        readers = two_on(subject, *bodies)
        dead, well = [subject.worker(subject.worker_of(reader)) for reader in readers]
        template = parent(dead["pid"])
        os.kill(template, signal.SIGSTOP)
        os.kill(dead["pid"], signal.SIGKILL)
        subject.until(lambda _: subject.worker(dead["worker"])["restarts"] > dead["restarts"])
    assert subject.judge(readers) == []
    back, same = subject.worker(dead["worker"]), subject.worker(well["worker"])
    assert (same["pid"], same["restarts"]) == (well["pid"], well["restarts"])
    assert parent(back["pid"]) == template
    assert not is_stopped(template)
    subject.daemon.wait_for("the template process was stopped for 5 s, continuing it")
    assert subject.judge_quiet() == []


def test_a_worker_stopped_while_loading_is_restarted(subject: Subject) -> None:
    """It has no pings to leave unanswered yet."""
    assert subject.judge_quiet() == []
    before = subject.worker("w0")
    (subject.faults / "w0.starting.STOP").touch()
    os.kill(before["pid"], signal.SIGKILL)
    why = f"killed by melld: stopped (SIGSTOP) for {SILENCE_S:.0f} s while starting"
    subject.until(lambda status: any(why in (worker["reason"] or "") for worker in status["workers"]))
    assert subject.judge_quiet() == []
    assert subject.worker("w0")["restarts"] == before["restarts"] + 2


def test_a_hung_load_ends_with_its_reason(demo_model: Path, tmp_path: Path) -> None:
    """As from a dead file server: a pipe that nobody writes to in place of some weights."""
    model = Path(shutil.copytree(demo_model, tmp_path / "model"))
    os.mkfifo(model / "model-00002-of-00002.safetensors")
    with DaemonProcess(model, "--device", "cpu:1", "--set", "health.load_stall_s=3") as daemon:
        assert daemon.wait_end() != 0
    said = "failed to start: killed by melld: computed and read nothing for 3 s while loading the model"
    assert said in daemon.lines[-1]
