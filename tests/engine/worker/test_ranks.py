"""The end of a worker's rank, on processes without a model."""

import os
import signal
import subprocess
import sys

import pytest

from tests.forked import ForkedPython
from tests.patience import PATIENCE_S

MAIN = """
import os, subprocess
from melld.engine.worker.ranks import _end_with_first
from melld.engine.worker.start import vital
rank = subprocess.Popen(["sleep", "60"])
print(rank.pid, flush=True)
vital(lambda: _end_with_first({os.pidfd_open(rank.pid): 1}))()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 6])
def test_a_worker_ends_the_way_its_rank_did(number: int) -> None:
    """By the same signal: how the worker ends decides which requests are suspected."""
    worker = ForkedPython([sys.executable, "-c", MAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout is not None
    os.kill(int(worker.stdout.readline()), number)
    _, said = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == -number
    assert said.decode().splitlines()[-1] == f"rank 1 of this worker exited by signal {int(number)}"
