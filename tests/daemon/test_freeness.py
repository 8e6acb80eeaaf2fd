"""A worker's room in the status comes from the scheduler's own counts."""

from types import SimpleNamespace
from typing import Any

from melld.daemon.why import Explainer
from melld.ids import WorkerId
from tests.scheduler.driving import lay_out, scheduler_with


def test_freeness_and_promised_bytes() -> None:
    """Two requests that grow by 10 bytes a second each fill 400 bytes in 20 s; what is promised is not free."""
    scheduler = scheduler_with(3, "mell-plus")
    lay_out(scheduler, {"a": 350, "b": 250}, {"c": 500}, growth_bytes_s=10.0)
    nothing: Any = SimpleNamespace()
    told = Explainer(scheduler, nothing, nothing, nothing, lambda: 0.0)
    assert [told.freeness_s(WorkerId(name)) for name in ("w0", "w1", "w2", "none")] == [20.0, 50.0, None, None]
    scheduler.cluster.promise(scheduler.cluster.workers[WorkerId("w0")], 300)
    assert told.freeness_s(WorkerId("w0")) == 5.0
    assert [told.promised_bytes(WorkerId(name)) for name in ("w0", "w1", "none")] == [300, 0, 0]
