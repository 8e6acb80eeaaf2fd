"""torchvision, which prepares the images of most models, beside the CPU build of PyTorch."""

import os
import subprocess
import sys

import pytest
import torch

from melld.engine.image_library import BESIDE, make_importable


def test_images_are_prepared_without_torchvision_s_library() -> None:
    """Qwen-VL, Gemma and Pixtral accept images on a CPU."""
    make_importable()
    from torchvision.transforms.v2 import functional

    assert functional.resize(torch.ones(3, 20, 30), [10, 15], antialias=True).shape == (3, 10, 15)


@pytest.mark.long
def test_torchvision_still_does_not_load_by_itself() -> None:
    """Once it does, the workaround can go."""
    if torch.version.cuda is not None:
        pytest.skip("the CUDA build of PyTorch loads it")
    command, where = [sys.executable, "-c", "import torchvision"], {"PYTHONPATH": str(BESIDE)}
    alone = subprocess.run(command, env=os.environ | where, check=False, capture_output=True, text=True)
    assert "operator torchvision::nms does not exist" in alone.stderr
