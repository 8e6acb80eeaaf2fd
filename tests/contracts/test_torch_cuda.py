"""What melld uses of torch and Triton only on a GPU, in the installed sources and headers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from melld.engine.arguments import ALLOCATOR_VARIABLES
from tests.contracts.sources import Fact, installed

FACTS = [
    Fact("a stream can be made for a device", "torch/cuda/streams.py", "Stream.__new__", "(cls, device=None,"),
    Fact(
        "an event can wait asleep",
        "torch/cuda/streams.py",
        "Event.__new__",
        "blocking=False, ... super().__new__( ... blocking=blocking",
    ),
    Fact(
        "an event is recorded on a stream",
        "torch/cuda/streams.py",
        "Event.record",
        "(self, stream: Stream | torch.Stream | None = None)",
    ),
    Fact("an event is waited for", "torch/cuda/streams.py", "Event.synchronize", "super().synchronize()"),
    Fact("a stream waits for an event", "torch/cuda/streams.py", "Stream.wait_event", "event.wait(self)"),
    Fact("a stream's handle is CUDA's", "torch/_C/__init__.pyi", "_CudaStreamBase", "cuda_stream: _int"),
    Fact(
        "peer access is asked by two indexes",
        "torch/cuda/__init__.py",
        "can_device_access_peer",
        "(device: Device, peer_device: Device) -> bool",
    ),
    Fact("a device has a UUID", "torch/_C/__init__.pyi", "_CudaDeviceProperties", "uuid: str"),
    Fact(
        "a fork after CUDA is noticed",
        "torch/cuda/__init__.py",
        "",
        '_is_in_bad_fork = getattr(torch._C, "_cuda_isInBadFork"',
    ),
    Fact(
        "an untouched CUDA starts no context on import", "torch/cuda/__init__.py", "_lazy_init", "torch._C._cuda_init()"
    ),
    Fact(
        "CUDA generators take an offset",
        "torch/include/ATen/cuda/CUDAGeneratorImpl.h",
        "",
        "void set_offset(uint64_t offset) override; ... uint64_t get_offset() const override;",
    ),
    *(
        Fact(f"the allocator reads {name}", "torch/include/c10/cuda/CUDAAllocatorConfig.h", "", f'get_env("{name}")')
        for name in ALLOCATOR_VARIABLES
    ),
    Fact(
        "expandable segments are an option of that name",
        "torch/include/c10/cuda/CUDAAllocatorConfig.h",
        "",
        'TORCH_WARN_ONCE("expandable_segments not supported',
    ),
]


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_torch_matches_the_cuda_side_s_assumptions(fact: Fact) -> None:
    """An upgrade of torch that breaks one fails here, by name, and not on the first GPU."""
    assert fact.holds_in(fact.source())


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_torch_that_differs_is_noticed(fact: Fact) -> None:
    """Each test above can fail: it does where the words are changed."""
    assert not fact.holds_in(fact.otherwise())


def test_triton_can_be_told_not_to_specialise() -> None:
    """Else a copy of one block, or of an odd number, would be compiled while a client waits."""
    beside = Path(sys.executable).parents[1] / "triton"
    code = (
        "import inspect, triton; names = inspect.signature(triton.JITFunction.__init__).parameters;"
        "assert {'do_not_specialize', 'do_not_specialize_on_alignment'} <= set(names), names"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(beside)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_storage_may_begin_inside_a_cuda_allocation() -> None:
    """Two tensors of one allocation: a handle is of its base, so the storage's offset goes along."""
    header = installed("torch/include/c10/cuda/CUDACachingAllocator.h").read_text()
    assert "getBaseAllocation" in header
    assert "nbytes" in dir(torch.UntypedStorage)
    assert "data_ptr" in dir(torch.UntypedStorage)


def test_torch_s_cuda_module_has_what_is_called() -> None:
    """By the names and the keywords that are used."""
    used = ("current_device", "device_count", "get_device_properties", "init", "synchronize", "device", "stream")
    assert [name for name in used if not hasattr(torch.cuda, name)] == []
    assert "non_blocking" in (torch.Tensor.to.__doc__ or "")
