"""vLLM's sleep mode as a dozing model on a GPU uses it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from melld.demo_model import make_demo_model
from tests.engine.worker.residency.driver import ENVIRONMENT
from tests.forked import ROOT
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.gpu


def test_an_engine_that_has_slept_answers_as_before(tmp_path: Path) -> None:
    """On a GPU its weights and KV memory are free meanwhile; a CPU, in the rehearsal, frees nothing."""
    make_demo_model(tmp_path / "demo")
    command = [sys.executable, "-m", "tests.gpu.sleeping", str(tmp_path / "demo"), DEVICE]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["after"] == facts["before"]
    if DEVICE == "cuda":
        assert facts["refusal"] == ""
        assert facts["asleep_bytes"] <= facts["held_bytes"] - (64 << 20)
