"""Finds hung workers, and kills them; the supervisor restarts what has died.

a worker answers no ping     killed after `ping_timeout_s` (SIGSTOP, a dead I/O thread)
its step never ends          killed after `step_timeout_s`
"""

import logging
from collections.abc import Collection

from melld.config import HealthConfig
from melld.engine.fleet.place import Place
from melld.engine.wire import messages as wire

log = logging.getLogger("melld.supervisor")
PING_INTERVAL_S = 1.0
PINGS_AT_LEAST = 4
"""Unanswered pings before a worker counts as hung, however short `ping_timeout_s` is."""


class HungWorkers:
    """The pings of the workers in these places."""

    def __init__(self, places: Collection[Place], health: HealthConfig) -> None:
        self.interval_s = min(PING_INTERVAL_S, health.ping_timeout_s / PINGS_AT_LEAST)
        self._places = places
        self._health = health

    def ping(self) -> None:
        """Ping each ready worker, every `interval_s`; kill those that have left too many pings unanswered."""
        allowed = round(self._health.ping_timeout_s / self.interval_s)
        for place in self._places:
            if place.process is None or not place.is_ready:
                continue
            if place.unanswered >= allowed:
                silent_s = self._health.ping_timeout_s
                log.error("%s: no ping reply for %.0f s, killing it", place.slot.worker, silent_s)
                place.process.kill()
            place.unanswered += 1
            place.process.send(wire.Ping())

    def judge_step(self, place: Place, pong: wire.Pong) -> None:
        """Kill a worker whose step takes too long."""
        if pong.busy_s > self._health.step_timeout_s and place.process is not None:
            log.error("%s: one step has taken %.0f s, killing it", place.slot.worker, pong.busy_s)
            place.process.kill()
