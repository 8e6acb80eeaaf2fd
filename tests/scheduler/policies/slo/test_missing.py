"""Promises of what a missing worker is reckoned to cost."""

import pytest

from melld.ids import WorkerId
from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.slo.missing import MissingWorkers
from melld.scheduler.reasons import Reason
from tests.scheduler.driving import scheduler_with

WAKE_S = 8.0


def cluster_with(workers: int) -> Cluster:
    """Workers that are asleep."""
    return scheduler_with(workers).cluster


def wake(cluster: Cluster, missing: MissingWorkers, worker: str, at_s: float) -> None:
    """The worker wakes until it computes."""
    cluster.now_s = at_s
    cluster.activate(cluster.workers[WorkerId(worker)], Reason.SERVICE)
    cluster.workers[WorkerId(worker)].wake_s = WAKE_S
    missing.look()
    cluster.now_s = at_s + WAKE_S / 2
    missing.look()
    cluster.workers[WorkerId(worker)].wake_s = 0.0


def waking_beside(missing: MissingWorkers, missed: int, good: int, seconds: float) -> None:
    """A worker wakes, so many requests miss a target beside it, and so many get what was promised in the time after."""
    cluster = missing._cluster
    began_s = cluster.now_s
    wake(cluster, missing, "w0", began_s)
    cluster.now_s = began_s + seconds
    missing.look()
    for number in range(missed + good):
        missing.ended(began_s, number >= missed)


def test_a_wake_costs_the_time_in_which_others_are_served_for_those_who_missed() -> None:
    """Half as many missed beside the wake as were served in a hundred seconds of a worker: fifty."""
    missing = MissingWorkers(cluster_with(1))
    waking_beside(missing, missed=5, good=10, seconds=100.0)
    assert missing.cost_s == pytest.approx(50.0, rel=0.05)


def test_what_is_missed_while_no_worker_wakes_is_no_matter_of_a_missing_one() -> None:
    """It came after the wake, or there was none."""
    cluster = cluster_with(1)
    missing = MissingWorkers(cluster)
    missing.ended(0.0, False)
    assert missing.cost_s == 0.0
    wake(cluster, missing, "w0", 10.0)
    missing.ended(10.0 + WAKE_S, False)
    assert missing.cost_s == 0.0
    missing.ended(10.0, False)
    assert missing.cost_s > 0.0


def test_the_cost_is_of_one_wake() -> None:
    """Two that wake together share what is missed; a worker that goes on waking wakes once."""
    alone, both = (MissingWorkers(cluster_with(2)) for _ in range(2))
    wake(alone._cluster, alone, "w0", 0.0)
    both._cluster.activate(both._cluster.workers[WorkerId("w1")], Reason.SERVICE)
    both._cluster.workers[WorkerId("w1")].wake_s = WAKE_S
    wake(both._cluster, both, "w0", 0.0)
    for missing in (alone, both):
        missing.ended(0.0, False)
        missing.ended(0.0, True)
    assert both.cost_s == pytest.approx(alone.cost_s * 2 / 2)  # twice the GPU-seconds, half of what is missed


def test_what_was_long_ago_fades_but_the_cost_stays() -> None:
    """While nothing is missed for want of a worker, no other figure of it is known."""
    missing = MissingWorkers(cluster_with(1))
    waking_beside(missing, missed=5, good=10, seconds=100.0)
    cost_s, cluster = missing.cost_s, missing._cluster
    for _ in range(5000):
        cluster.now_s += 10.0
        missing.look()
        missing.ended(cluster.now_s, True)
    assert missing.cost_s == pytest.approx(cost_s, rel=0.1)
