"""The demo model, for tests: half as deep, so that a step takes two thirds of the time."""

from pathlib import Path
from unittest import mock

from melld import demo_model


def make_small_model(directory: Path, seed: int = 0) -> None:
    """Write it into `directory`.  With twice the heads a token's KV is as large as the demo model's."""
    wide = {"HEADS": 2 * demo_model.HEADS, "KV_HEADS": 2 * demo_model.KV_HEADS}
    with mock.patch.multiple(demo_model, LAYERS=demo_model.LAYERS // 2, **wide):
        demo_model.make_demo_model(directory, seed)
