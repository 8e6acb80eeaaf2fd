"""Ray nodes, for the tests that need them."""

from collections.abc import Iterator

import pytest

from tests.cluster.ray_nodes import HEAD, OTHER, RayNodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes on this machine, in whose environment the module's tests run.  As in a new shell, it names no mode."""
    with RayNodes() as made, pytest.MonkeyPatch.context() as patch:
        for key, value in made.environment.items():
            patch.setenv(key, value)
        patch.delenv("RAY_AUTH_MODE")
        made.start(HEAD)
        made.start(OTHER)
        yield made
