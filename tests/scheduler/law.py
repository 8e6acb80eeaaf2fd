"""Invariants of a cluster's records: the tests of the scheduler, the simulator and the daemon check every state."""

from melld.scheduler.cluster import Cluster
from melld.scheduler.state import Duty, RequestState


def check_cluster(cluster: Cluster) -> None:
    """Check that every sum and state follows from the records."""
    _check_workers(cluster)
    _check_requests(cluster)


def _check_workers(cluster: Cluster) -> None:
    """Check that every worker's sums match its requests, and that it is listed where its state says."""
    for worker in cluster.workers.values():
        held = [*worker.requests.values(), *worker.arriving.values()]
        awake = worker.state in (Duty.ACTIVE, Duty.DRAINING)
        assert awake or not held, worker.id
        assert (worker.id in cluster.active) == (worker.state is Duty.ACTIVE), worker.id
        assert (worker.id in cluster.draining) == (worker.state is Duty.DRAINING), worker.id
        assert (worker.id in cluster._empty) == (awake and not held), worker.id
        if not held:
            sums = worker.count, worker.urgent, worker.held_bytes, worker.leaving_bytes, worker.leaving
            assert not any(sums), worker.id
            assert min(worker.used_bytes, worker.shared_bytes) >= 0, worker.id
            continue
        leaving = [request for request in worker.requests.values() if request.destination is not None]
        assert worker.count == len(held), worker.id
        assert worker.urgent == sum(request.urgent for request in held), worker.id
        assert worker.held_bytes == sum(request.kv_bytes for request in held), worker.id
        assert min(worker.used_bytes, worker.shared_bytes) >= 0, worker.id
        assert worker.leaving_bytes == sum(request.kv_bytes for request in leaving), worker.id
        assert worker.leaving == len(leaving), worker.id
        assert all(request.worker is worker for request in worker.requests.values()), worker.id
        assert all(request.destination is worker for request in worker.arriving.values()), worker.id


def _check_requests(cluster: Cluster) -> None:
    """Check that every request is where its state says, and nowhere else."""
    for request in cluster.requests.values():
        assert (request.state is RequestState.WAITING) == (request.worker is None), request.id
        assert (request.state is RequestState.MOVING) == (request.destination is not None), request.id
        assert (request.state is RequestState.WAITING) == (request.id in cluster.waiting), request.id
        assert not request.pinned or request.worker is not None, request.id
        assert request.worker is None or cluster.workers.get(request.worker.id) is request.worker, request.id
