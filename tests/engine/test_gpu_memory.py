"""GPU memory that processes share by descriptors, over a test library."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.engine.gpu_memory import MOST_CHUNKS, NoSharedMemory, chunks_of, made_by_another
from tests.engine.fake_cuda import build
from tests.forked import run_python

GIB, UNIT = 1 << 30, 2 << 20
NBYTES = 600 << 20
MAP = """
import ctypes, json, os, sys
library, files, sizes, fails = json.loads(sys.argv[1])
ctypes.CDLL(library)
os.environ["FAKE_CUDA_FAILS"] = fails
from melld.engine.gpu_memory import NoSharedMemory, map_chunks
try:
    address = map_chunks(files, sizes)
except NoSharedMemory as error:
    print(error)
    sys.exit(1)
ctypes.memset(address, 7, 4)
ctypes.memset(address + sum(sizes) - 4, 8, 4)
open_still = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]
print(json.dumps([address % (2 << 20), ctypes.string_at(address + sizes[0] - 2, 4).hex(), open_still]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU; its facts are in the environment."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    return monkeypatch


@pytest.fixture
def files(machine: pytest.MonkeyPatch) -> Iterator[list[int]]:
    made, sizes = made_by_another("GPU-1", NBYTES)
    assert sizes == (256 << 20, 256 << 20, 88 << 20)
    yield made
    for file in made:
        os.close(file)


def map_there(library: Path, files: list[int], sizes: list[int], fails: str = "") -> tuple[int, str]:
    """Map the chunks in another process; return how it ends and what it prints."""
    told = json.dumps([str(library), files, sizes, fails])
    done = run_python("-c", MAP, told, pass_fds=files)
    return done.returncode, done.stdout.strip()


@given(st.integers(1, 300 * GIB), st.sampled_from([UNIT, 4 * UNIT, 64 << 10]))
def test_the_chunks_cover_everything_and_fit_into_one_message(nbytes: int, unit: int) -> None:
    """Even of the largest card; each has a size that the device offers."""
    sizes = chunks_of(nbytes, unit)
    assert nbytes <= sum(sizes) < nbytes + unit * len(sizes)
    assert len(sizes) <= MOST_CHUNKS
    assert all(size > 0 and size % unit == 0 for size in sizes)


def test_memory_outlives_its_maker_and_maps_as_one_range(library: Path, files: list[int]) -> None:
    """The daemon alone holds it while no worker does; what one worker writes another reads."""
    sizes = [256 << 20, 256 << 20, 88 << 20]
    os.pwrite(files[0], b"\1\2", sizes[0] - 2)
    os.pwrite(files[1], b"\3\4", 0)
    assert map_there(library, files, sizes) == (0, '[0, "01020304", []]')
    assert os.pread(files[0], 4, 0) == b"\7" * 4
    assert os.pread(files[2], 4, sizes[2] - 4) == b"\x08" * 4


def test_a_worker_with_a_missing_descriptor_says_so(library: Path, files: list[int]) -> None:
    """A process at its file limit receives fewer than were sent."""
    said = map_there(library, files[:2], [256 << 20, 256 << 20, 88 << 20])
    assert said == (1, "2 of 3 descriptors have arrived")


@pytest.mark.parametrize(
    "call",
    ["cuInit", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemRelease", "cuMemSetAccess"],
)
def test_a_worker_reports_its_driver_s_refusal(library: Path, files: list[int], call: str) -> None:
    """It fails with a reason, and does not write to unmapped memory."""
    code, said = map_there(library, files, [256 << 20, 256 << 20, 88 << 20], call)
    assert code == 1
    assert said.startswith(f"{call}: ")


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_the_maker_reports_its_driver_s_refusal(machine: pytest.MonkeyPatch, call: str) -> None:
    """The daemon does not start, and its operator reads why."""
    machine.setenv("FAKE_CUDA_FAILS", call)
    with pytest.raises(NoSharedMemory, match=rf"^{call}: unknown error \(999\)$"):
        made_by_another("GPU-1", NBYTES)


def test_more_memory_than_the_device_has_is_refused(machine: pytest.MonkeyPatch) -> None:
    """Another program may have taken it."""
    machine.setenv("FAKE_CUDA_BYTES", str(NBYTES - 1))
    with pytest.raises(NoSharedMemory, match=r"^cuMemCreate: out of memory \(2\)$"):
        made_by_another("GPU-1", NBYTES)


def test_without_a_driver_there_is_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the loader's."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if Path("/dev/nvidiactl").exists():
        pytest.skip("here is one")
    with pytest.raises(NoSharedMemory, match=r"libcuda\.so\.1"):
        made_by_another("GPU-1", NBYTES)
