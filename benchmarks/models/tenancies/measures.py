"""Measures how well several models were served: latency against that of each request alone, and the time of devices."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from melld.simulator.latency import LatencyProfile

from .device import SimulatedRequest
from .setting import ModelArrival, Setting

SLO_TIMES = 8.0
"""A request is in time if it takes at most so many times what it would take alone."""
WARM_UP_S = 60.0
"""Requests before this time do not count: models are loaded for the first time."""


class ModelsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run.  `attainment`: part of the counted requests that were in time."""

    tenancy: str
    requests: int
    attainment: float
    requests_per_s: float
    slowdown_p50: float
    slowdown_p99: float
    device_seconds: float
    preemptions: int
    loads: int


class ModelsMeasures:
    """Counters of one run."""

    PATIENCE_S = 120.0
    """What has not ended so long after the last arrival is late anyway."""

    def __init__(self, setting: Setting, last_s: float) -> None:
        self.setting = setting
        self._last_s = last_s
        self.preemptions = 0
        self.loads = 0
        self.device_seconds = 0.0
        self._slowdowns: list[float] = []
        self._counted = 0
        self._window_s = 0.0

    def ended(self, request: SimulatedRequest, profile: LatencyProfile, now_s: float) -> None:
        """Judge a request that has ended."""
        arrival = request.arrival
        if arrival.at_s >= WARM_UP_S:
            self._slowdowns.append((now_s - arrival.at_s) / alone_s(arrival, profile))

    def sample(self, now_s: float, awake: Iterable[str]) -> None:
        """Count the devices that were awake in the epoch, between the warm-up and the last arrival."""
        if WARM_UP_S <= now_s <= self._last_s:
            self.device_seconds += self.setting.epoch_s * len(list(awake))

    def end(self, now_s: float, arrivals: Sequence[ModelArrival]) -> None:
        """Note what was to be served."""
        self._counted = sum(one.at_s >= WARM_UP_S for one in arrivals)
        self._window_s = max(now_s - WARM_UP_S, self.setting.epoch_s)

    def report(self, tenancy: str) -> ModelsReport:
        """Return the results; a request that never ended was late."""
        slowdowns = np.array(self._slowdowns or [0.0])
        p50, p99 = np.percentile(slowdowns, [50, 99]).tolist()
        return ModelsReport(
            tenancy=tenancy,
            requests=self._counted,
            attainment=float((np.array(self._slowdowns) <= SLO_TIMES).sum()) / max(self._counted, 1),
            requests_per_s=len(self._slowdowns) / self._window_s,
            slowdown_p50=p50,
            slowdown_p99=p99,
            device_seconds=self.device_seconds,
            preemptions=self.preemptions,
            loads=self.loads,
        )


def alone_s(arrival: ModelArrival, profile: LatencyProfile) -> float:
    """Return what the request would take alone on the device."""
    prompt, output = arrival.lengths
    step_s = float(profile.step_s(np.ones(1), np.array([prompt + output / 2]))[0])
    return profile.prefill_s(prompt) + output * step_s
