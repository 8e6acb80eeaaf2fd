"""Workers that are dear to start, shared by the tests that step them by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from melld.demo_model import make_demo_model
from tests.engine.worker.residency.driver import WorkerProxy
from tests.engine.worker.residency.pair import two_workers


@pytest.fixture(scope="session")
def residency_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProxy, WorkerProxy]]:
    """Two vLLM workers on the demo model; whoever uses them leaves them empty."""
    model = tmp_path_factory.mktemp("model") / "demo"
    make_demo_model(Path(model))
    with two_workers(model, {}) as workers:
        yield workers
