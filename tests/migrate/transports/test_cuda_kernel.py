"""The kernel that copies KV between GPUs, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_python

TRITON = Path(sys.prefix) / "triton"


pytestmark = pytest.mark.skipif(
    not TRITON.is_dir(), reason="no Triton beside the packages (make setup puts it there for tests)"
)
FIND = f"import sys; sys.path.insert(0, {str(TRITON)!r})\n"
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from melld.migrate.transports.cuda_kernel import WORDS_PER_PROGRAM, _copy_chunks
for wide in (True, False):
    types = {name: "*i64" if name.endswith(("blocks", "offsets")) else "i64" for name in _copy_chunks.arg_names}
    fixed = {"WORDS": WORDS_PER_PROGRAM, "WIDE": wide}
    source = ASTSource(_copy_chunks, types | dict.fromkeys(fixed, "constexpr"), fixed)
    print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"].count("st.global"))
"""
INTERPRET = "from tests.migrate.transports.interpreted_kernel import main; main()"


def run(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it where Triton can be found: in a fork that has PyTorch imported, but no Triton yet."""
    return run_python("-c", FIND + code, env=os.environ | more)


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    done = run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2
    assert "0" not in done.stdout.split(), "it stores nothing"


def test_the_kernel_matches_plain_indexing() -> None:
    """In every layout and for every number of blocks: exactly the named blocks' bytes arrive."""
    done = run(INTERPRET, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert len(done.stdout.splitlines()) == 32
