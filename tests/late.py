"""Modules that take seconds to import: vLLM's, and ours that import them."""

import importlib
import warnings
from typing import Any


class Late:
    """A module, imported when something of it is first asked for: no process waits for what its tests do not use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's imports give several
            return getattr(importlib.import_module(self._name), name)
