"""Invariants of a cluster's records.

Assertions only; changes nothing.  Tests and the simulator's tests check every state against them.
"""

from collections.abc import Mapping

from melld.ids import RequestId, WorkerId
from melld.scheduler.state import Duty, Request, RequestState, Worker
from melld.scheduler.waiting import WaitingQueue

Workers = Mapping[WorkerId, Worker]


def check_workers(workers: Workers, active: Workers, draining: Workers, empty: Workers) -> None:
    """Assert that every worker's sums match its requests and that it is listed where its state says."""
    for worker in workers.values():
        held = [*worker.requests.values(), *worker.arriving.values()]
        leaving = [request for request in worker.requests.values() if request.destination is not None]
        assert worker.count == len(held), worker.id
        assert worker.urgent == sum(request.urgent for request in held), worker.id
        assert worker.held_bytes == sum(request.kv_bytes for request in held), worker.id
        assert min(worker.used_bytes, worker.shared_bytes) >= 0, worker.id
        assert worker.leaving_bytes == sum(request.kv_bytes for request in leaving), worker.id
        assert worker.leaving == len(leaving), worker.id
        assert all(request.worker is worker for request in worker.requests.values()), worker.id
        assert all(request.destination is worker for request in worker.arriving.values()), worker.id
        awake = worker.state in (Duty.ACTIVE, Duty.DRAINING)
        assert awake or not held, worker.id
        assert (worker.id in active) == (worker.state is Duty.ACTIVE), worker.id
        assert (worker.id in draining) == (worker.state is Duty.DRAINING), worker.id
        assert (worker.id in empty) == (awake and not held), worker.id


def check_requests(requests: Mapping[RequestId, Request], workers: Workers, waiting: WaitingQueue) -> None:
    """Assert that every request is where its state says, and nowhere else."""
    for request in requests.values():
        assert (request.state is RequestState.WAITING) == (request.worker is None), request.id
        assert (request.state is RequestState.MOVING) == (request.destination is not None), request.id
        assert (request.state is RequestState.WAITING) == (request.id in waiting), request.id
        assert not request.pinned or request.worker is not None, request.id
        assert request.worker is None or workers.get(request.worker.id) is request.worker, request.id
