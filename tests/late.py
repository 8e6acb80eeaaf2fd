"""Modules that take seconds to import: vLLM's, and ours that import them."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any


def late(name: str) -> Callable[[], Any]:
    """The module by this name, imported when it is first called for: no process waits for what its tests do not use."""

    @functools.cache
    def module() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's imports give several
            return importlib.import_module(name)

    return module
