"""Reckons what a missing worker costs: the requests that miss a target while it wakes, in GPU-seconds.

Owns fading sums of GPU-seconds, of requests served in time, and of wakes with what was missed beside them.  Never
decides how long a worker is kept.
"""

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.slo import constants


class MissingWorkers:
    """Fading sums of one cluster, and what a wake costs by them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looked_s: float | None = None
        self._woke_s = float("-inf")  # when a worker was seen to wake last
        self._newest = -1  # of the activations seen
        self._gpu_s = self._good = self._wakes = self._missed = 0.0

    def look(self) -> None:
        """Note the time that has passed, and the workers that wake."""
        now_s, active = self._cluster.now_s, self._cluster.active.values()
        if self._looked_s is not None:
            self._gpu_s += len(active) * (now_s - self._looked_s)
        self._looked_s = now_s
        waking = [worker.order for worker in active if worker.wake_s]
        if waking:
            self._woke_s = now_s
            self._wakes += sum(order > self._newest for order in waking)
            self._newest = max(self._newest, *waking)

    def ended(self, arrived_s: float, is_good: bool) -> None:
        """Record a request, which was served in time or not."""
        keep = 1.0 - 1.0 / constants.REMEMBERED
        self._gpu_s, self._wakes = keep * self._gpu_s, keep * self._wakes
        self._good = keep * self._good + is_good
        self._missed = keep * self._missed + (not is_good and arrived_s <= self._woke_s)

    @property
    def cost_s(self) -> float:
        """Return the GPU-seconds in which as many requests are served in time as miss a target beside one wake."""
        return self._missed / self._wakes * self._gpu_s / max(self._good, 1.0) if self._wakes else 0.0
