"""The kernel that copies KV between GPUs, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = Path(sys.prefix) / "triton"


pytestmark = pytest.mark.skipif(
    not TRITON.is_dir(), reason="no Triton beside the packages (make setup puts it there for tests)"
)
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


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{TRITON}{os.pathsep}{Path.cwd()}"} | more
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    done = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2
    assert "0" not in done.stdout.split(), "it stores nothing"


def test_the_kernel_matches_plain_indexing() -> None:
    """In every layout and for every number of blocks: exactly the named blocks' bytes arrive."""
    done = run("-m", "tests.migrate.transports.interpreted_kernel", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert len(done.stdout.splitlines()) == 32
