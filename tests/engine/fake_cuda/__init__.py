"""A fake GPU's memory, for tests: a C library with the CUDA calls that melld makes for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cuda.c"


def build(directory: Path) -> Path:
    """Build `libcuda.so.1` in the directory; once loaded, it is found by this name alone."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the fake CUDA library with")
    library = directory / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library
