"""The demo model, for tests: half as deep and half as wide, so that a step of a few requests takes half of the time.

And with room for half of the tokens: a worker fills tables of that length as it starts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from melld import demo_model

MAX_TOKENS = 16384
HIDDEN, INTERMEDIATE = demo_model.HIDDEN // 2, demo_model.INTERMEDIATE // 2


def make_small_model(directory: Path, seed: int = 0, intermediate: int = INTERMEDIATE) -> None:
    """Write it into `directory`.  With twice the heads a token's KV is as large as the demo model's."""
    shape = {
        "LAYERS": demo_model.LAYERS // 4,
        "HIDDEN": HIDDEN,
        "INTERMEDIATE": intermediate,
        "HEADS": 4 * demo_model.HEADS,
        "KV_HEADS": 4 * demo_model.KV_HEADS,
    }
    with mock.patch.multiple(demo_model, **shape, _model_config=_shortened(demo_model._model_config)):
        demo_model.make_demo_model(directory, seed)


def _shortened(model_config: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    return lambda seed: model_config(seed) | {"max_position_embeddings": MAX_TOKENS}
