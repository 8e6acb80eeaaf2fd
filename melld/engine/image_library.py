"""Makes torchvision's PyPI wheel, built for CUDA, load with PyTorch's CPU build.

Owns where it is, and the seam.  `make` installs it beside the packages, where nobody else finds it: its C library wants
CUDA, and without that library what describes its operators to PyTorch fails (`torchvision._meta_registrations`), and
with it `import transformers`.  Images are prepared by the rest, which is Python over PyTorch's own operators.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

BESIDE = Path(sys.prefix) / "vision"
DESCRIPTIONS, LIBRARY = "torchvision._meta_registrations", "torchvision.extension"


class _NothingToDescribe(MetaPathFinder, Loader):
    """Provides an empty module in place of the operator descriptions, if torchvision has no operators."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        library: Any = sys.modules.get(LIBRARY) if fullname == DESCRIPTIONS else None
        return None if library is None or library._has_ops() else ModuleSpec(fullname, self)  # noqa: SLF001

    def create_module(self, spec: ModuleSpec) -> None:
        """See `Loader`."""

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`."""


def make_importable() -> None:
    """Make torchvision importable in this process, without its operators if it has none."""
    if BESIDE.is_dir() and find_spec("torchvision") is None:
        sys.path.append(str(BESIDE))
    if not any(isinstance(finder, _NothingToDescribe) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NothingToDescribe())
