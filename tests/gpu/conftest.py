"""On which device these tests run: a GPU, or CPU devices where `benchmarks/gpu_check.py` is rehearsed."""

import os

import pytest
import torch

DEVICE = os.environ.get("MELLD_GPU_CHECK_DEVICE", "cuda")


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
