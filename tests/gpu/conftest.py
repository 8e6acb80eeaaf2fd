"""The device that these tests run on: a GPU, or CPU devices in the rehearsal of `benchmarks/tools/gpu_check.py`."""

import os

import pytest
import torch

DEVICE = os.environ.get("MELLD_GPU_CHECK_DEVICE", "cuda")
# Triton's products of float32 keep ten bits otherwise: computed again in another batch, an answer could differ.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
