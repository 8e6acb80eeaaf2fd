"""The dashboard in docs/grafana shows existing metrics."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.daemon_process import DaemonProcess

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "melld.json").read_text())
NAME = re.compile(r"\b(?:melld_|vllm:)\w+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


def targets() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield from panel.get("targets", ())


@pytest.fixture(scope="module")
def labels(daemon: DaemonProcess) -> dict[str, set[str]]:
    """Return every metric of a real daemon with its label names (none while it has no series)."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(daemon.get("/metrics")):
        for suffix in SUFFIXES.get(family.type, ()):
            found[family.name + suffix] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_the_dashboard_exists(labels: dict[str, set[str]]) -> None:
    """A panel without data after an upgrade would be taken for calm."""
    named = {name for target in targets() for name in NAME.findall(target["expr"])}
    assert named - labels.keys() == set()
    assert len(named) > 15


def test_every_label_of_a_legend_exists(labels: dict[str, set[str]]) -> None:
    """Lines that cannot be told apart say nothing."""
    for target in targets():
        known = set().union(*(labels[name] for name in NAME.findall(target["expr"])))
        summed_by = re.findall(r"by \(([^)]*)\)", target["expr"])
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        if known:
            assert wanted <= known, target
        assert not summed_by or wanted <= {name.strip() for name in summed_by[0].split(",")}, target


def test_the_panels_do_not_overlap() -> None:
    """And every query has a unique name in its panel."""
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & own, panel["title"]
        cells |= own
        names = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(names)) == len(names)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
