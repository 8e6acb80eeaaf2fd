"""Two workers per file, of the kind that the file names in `shared_pair`."""

from collections.abc import Iterator

import pytest

from tests.engine.worker.residency.driver import WorkerProxy
from tests.engine.worker.residency.pair import Pair


@pytest.fixture(scope="session")
def plain_pair(residency_workers: tuple[WorkerProxy, WorkerProxy]) -> Pair:
    """The workers that most files use, and their answers when nothing moved."""
    return Pair(*residency_workers)


@pytest.fixture(scope="module")
def shared_pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    with shared_pair.emptied():
        yield shared_pair
