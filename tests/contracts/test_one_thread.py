"""The template of GPU workers can be forked: with its imports done, it has one thread and no CUDA context.

Seen here: numpy with its BLAS, torch, transformers, vLLM with both GPU runners, and Triton beside them.  Not seen: what
CUDA's build of torch and vLLM's compiled kernels do as they are loaded; `has_one_thread` asks again before each fork.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT
from melld.engine.worker.forking import IMPORTS_OF_KIND
from tests.forked import ROOT, run_python

TRITON = Path(sys.executable).parents[1] / "triton"  # where vLLM's CPU build does not find it by itself
TEMPLATE = f"""
import sys
from melld.engine.worker import forking
forking.preload("cuda")
assert set({IMPORTS_OF_KIND["cuda"]!r}) | {{"numpy", "torch", "triton", "transformers"}} <= set(sys.modules)
print(forking.has_one_thread(), forking.may_use_gpu())
"""
NUMPY = """
import numpy
from melld.engine.worker import forking
print(forking.has_one_thread())
"""


def told(code: str, **environment: str) -> list[str]:
    """Return the words that this program prints last, with these variables."""
    path = os.pathsep.join([str(ROOT), str(TRITON)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_a_gpu_worker_s_extra_imports_make_no_thread_and_no_context() -> None:
    """The short form: the nursery, with the rest imported, is known to have one thread."""
    code = f"import sys; sys.path.append({str(TRITON)!r}); import triton" + TEMPLATE
    done = run_python("-c", code, cwd=ROOT, env=os.environ | COMMON_ENVIRONMENT)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["True True"]), done.stderr


@pytest.mark.long
def test_a_gpu_worker_s_imports_make_no_thread_and_no_context() -> None:
    """Else every worker would import everything anew, and start in half a minute instead of a second."""
    assert told(TEMPLATE, **COMMON_ENVIRONMENT) == ["True", "True"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="BLAS makes one thread for each core")
def test_blas_threads_are_noticed() -> None:
    """The workers' environment forbids them; a count that missed them would prove nothing."""
    assert told(NUMPY, OPENBLAS_NUM_THREADS="2") == ["False"]
    assert told(NUMPY, **COMMON_ENVIRONMENT) == ["True"]
