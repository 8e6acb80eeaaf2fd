"""Ray nodes, for the tests that need them."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.cluster.ray_nodes import HEAD, OTHER, RayNodes


@contextlib.contextmanager
def two_nodes(*, with_engine: bool) -> Iterator[RayNodes]:
    """Two nodes on this machine, in whose environment the module's tests run.  As in a new shell, it names no mode."""
    with RayNodes(with_engine=with_engine) as made, pytest.MonkeyPatch.context() as patch:
        for key, value in made.environment.items():
            patch.setenv(key, value)
        patch.delenv("RAY_AUTH_MODE")
        made.start(HEAD)
        made.start(OTHER)
        yield made


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Nodes whose workers can serve."""
    with two_nodes(with_engine=True) as made:
        yield made
