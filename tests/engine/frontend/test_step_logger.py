"""The histograms of the metrics."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Histogram

from melld.engine.frontend.step_logger import Bisected

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, *BOUNDS, 99.0, float("inf")]), st.integers(1, 3))))
@example([(bound, 1) for bound in BOUNDS])
def test_a_histogram_counts_as_the_library_s(values: list[tuple[float, int]]) -> None:
    """Dashboards read the same buckets, whichever way a value's bucket is found."""
    ours, theirs = (kind("latency", "", buckets=BOUNDS, registry=None) for kind in (Bisected, Histogram))
    for value, times in values:
        ours.observe(value, times=times)
        for _ in range(times):
            theirs.observe(value)
    ((found,), (expected,)) = (one.collect() for one in (ours, theirs))
    for ours_, theirs_ in zip(found.samples, expected.samples, strict=True):
        assert (ours_.name, ours_.labels) == (theirs_.name, theirs_.labels)
        if not ours_.name.endswith("_created"):
            assert ours_.value == pytest.approx(theirs_.value)
