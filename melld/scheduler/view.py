"""The view that others have of the scheduler's cluster: they read it between two events, and change nothing."""

from collections.abc import Mapping
from typing import Protocol

from melld.ids import RequestId, WorkerId
from melld.scheduler.state import Request, Worker


class ClusterView(Protocol):
    """Requests and workers as the scheduler counts them now."""

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Return all that have not ended."""

    @property
    def workers(self) -> Mapping[WorkerId, Worker]:
        """Return all that the scheduler may use, awake or not."""

    @property
    def active(self) -> Mapping[WorkerId, Worker]:
        """Return those that are awake and take requests."""

    @property
    def draining(self) -> Mapping[WorkerId, Worker]:
        """Return those that are awake and take none."""

    @property
    def now_s(self) -> float:
        """Return the time of the last event."""

    @property
    def ahead_bytes(self) -> int:
        """Return what a request is expected to grow by within one horizon."""

    def could_hold(self, kv_bytes: int) -> bool:
        """Return True where some worker that takes requests would hold so much if it were empty."""
