"""Workers that are slow to start, shared by the tests that step them by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.worker.residency.driver import WorkerProxy
from tests.engine.worker.residency.pair import two_workers


@pytest.fixture(scope="session")
def residency_workers(demo_model: Path) -> Iterator[tuple[WorkerProxy, WorkerProxy]]:
    """Two vLLM workers on the demo model; each test leaves them empty."""
    with two_workers(demo_model, {}) as workers:
        yield workers
