"""A daemon whose output nobody reads: a stopped terminal, then a closed one."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from melld.control.client import ControlClient
from tests import worker_faults
from tests.api.http_client import request
from tests.faults.reader import Reader
from tests.forked import ForkedPython
from tests.patience import PATIENCE_S


def status(directory: Path) -> Any:
    return json.loads(ControlClient([directory], answer_s=PATIENCE_S).status())


def test_unread_output_blocks_nobody(demo_model: Path, tmp_path: Path) -> None:
    """Ctrl-S in its terminal stops no stream, and `melld serve | head` ends cleanly."""
    words = ["serve", "--port", "0", "--model", str(demo_model), "--name", "demo", "--device", "cpu:1"]
    words += ["--log-level", "debug", "--runtime-directory", str(tmp_path), "--kv-bytes", "8MiB"]
    command = [sys.executable, "-m", "melld", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "bufsize": 0}
    with ForkedPython(command, **pipes, env=os.environ | {worker_faults.VARIABLE: str(tmp_path)}) as daemon:
        assert daemon.stdout is not None
        fcntl.fcntl(daemon.stdout, fcntl.F_SETPIPE_SZ, 4096)
        lines = iter(daemon.stdout.readline, b"")
        url = next(line.split()[-1].decode().removesuffix("/v1") for line in lines if b"/v1" in line)
        # A worker that loads says more than fits into the pipe.
        os.kill(status(tmp_path)["workers"][0]["pid"], signal.SIGKILL)
        while status(tmp_path)["workers"][0]["restarts"] == 0 or status(tmp_path)["workers"][0]["state"] != "ready":
            assert request(url, "GET", "/health").status == 200
            time.sleep(0.02)  # another process: asking it is the only way to know
        with worker_faults.slowed(tmp_path):
            reader = Reader(url, {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True})
            reader.wait_chunks(3)
            daemon.stdout.close()
            daemon.send_signal(signal.SIGTERM)
        reader.wait_end()
        daemon.send_signal(signal.SIGHUP)  # the terminal's last word, for which it reads no configuration any more
        assert reader.ends == ["length"]
        assert daemon.wait(PATIENCE_S) == 0
