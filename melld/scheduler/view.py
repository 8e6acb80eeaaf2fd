"""A read-only view of the scheduler's cluster, to be read between two events."""

from collections.abc import Mapping
from typing import Protocol

from melld.ids import RequestId, WorkerId
from melld.scheduler.state import Request, Worker


class ClusterView(Protocol):
    """Requests and workers as the scheduler counts them now."""

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Return all unfinished requests."""

    @property
    def workers(self) -> Mapping[WorkerId, Worker]:
        """Return all workers that the scheduler may use, awake or not."""

    @property
    def active(self) -> Mapping[WorkerId, Worker]:
        """Return the workers that are awake and take requests."""

    @property
    def draining(self) -> Mapping[WorkerId, Worker]:
        """Return the workers that are awake and take no requests."""

    @property
    def now_s(self) -> float:
        """Return the time of the last event."""

    @property
    def ahead_bytes(self) -> int:
        """Return a request's expected growth within one horizon."""

    def could_hold(self, kv_bytes: int) -> bool:
        """Return True if some worker that takes requests could hold this much when empty."""
