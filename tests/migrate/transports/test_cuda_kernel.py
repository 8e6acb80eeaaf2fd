"""The kernel that copies KV between GPUs, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = Path(sys.prefix) / "triton"


@pytest.mark.skipif(not TRITON.is_dir(), reason="no Triton beside the packages (make setup puts it there for tests)")
def test_the_kernel_copies_what_plain_indexing_copies() -> None:
    """Every layout and number of blocks: the bytes that arrive are those of the named blocks, and no others."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{TRITON}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.migrate.transports.interpreted_kernel"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert len(done.stdout.splitlines()) == 32
