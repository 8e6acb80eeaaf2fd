"""The first lines of a process forked from the template: whose end ends it."""

import os
import select
import signal
import subprocess
import sys

import pytest

from melld.engine.worker.forking import die_with_daemon
from tests.forked import ROOT
from tests.patience import PATIENCE_S

DAEMON = """
import multiprocessing
from multiprocessing import forkserver
from tests.engine.worker.test_forking import stand_still

if __name__ == "__main__":
    multiprocessing.get_context("forkserver").Process(target=stand_still).start()
    print("template", forkserver._forkserver._forkserver_pid, flush=True)
    input()
"""


def stand_still() -> None:
    """Be a worker that can do nothing any more."""
    die_with_daemon()
    print("worker", os.getpid(), flush=True)  # noqa: T201
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("first", ["template", "daemon"])
def test_the_kernel_ends_a_worker_with_the_daemon_not_with_the_template(first: str) -> None:
    """It frees the device even if stopped or stuck in a kernel, and outlives what forked it."""
    words = [sys.executable, "-c", DAEMON]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        said = dict(daemon.stdout.readline().split() for _ in range(2))
        worker, template = int(said["worker"]), int(said["template"])
        end = os.pidfd_open(worker)
        if first == "template":
            gone = os.pidfd_open(template)
            os.kill(template, signal.SIGKILL)
            assert select.select([gone], [], [], PATIENCE_S)[0]
            os.close(gone)
            assert not select.select([end], [], [], 0)[0]
        daemon.kill()
        assert select.select([end], [], [], PATIENCE_S)[0], "it outlives the daemon"
        os.close(end)
