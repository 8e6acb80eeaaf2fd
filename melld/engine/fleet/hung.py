"""Finds hung workers, and kills them; the supervisor restarts what has died.

a worker answers no ping, and is idle       killed after `ping_timeout_s` (SIGSTOP, a dead I/O thread)
it answers none, but computes or reads      killed after `step_timeout_s`: others may take its processors
a rank of it, or a loading one, is stopped  killed after `ping_timeout_s`
its step never ends                         killed after `step_timeout_s`
it loads, but neither computes nor reads    killed after `load_stall_s`
its machine is silent                       not judged: `[cluster] silence_s` decides whether that is lost
"""

import logging
import time
from collections.abc import Collection

from melld.config import HealthConfig
from melld.engine.fleet.life import State
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerProcess
from melld.engine.host.standstill import Standstill
from melld.engine.wire import messages as wire

log = logging.getLogger("melld.supervisor")
PING_INTERVAL_S = 1.0
PINGS_AT_LEAST = 4
"""Unanswered pings before a worker counts as hung, however short `ping_timeout_s` is."""
IDLE_LOOKS = 2
"""Looks in a row that find a silent worker idle before it counts as hung; other machines tell of each a look later."""


class HungWorkers:
    """Finds and kills the workers in these places that hang."""

    def __init__(self, places: Collection[Place], health: HealthConfig) -> None:
        self.interval_s = min(PING_INTERVAL_S, health.ping_timeout_s / PINGS_AT_LEAST)
        self._allowed = health.ping_timeout_s / self.interval_s
        self._places = places
        self._health = health

    def look(self) -> None:
        """Look at each worker, every `interval_s`, and kill those that hang.

        Raises:
            ExceptionGroup: some could not be looked at; the others were.
        """
        failed: list[Exception] = []
        for place in self._places:
            try:
                self._look_at(place)
            except Exception as error:  # noqa: BLE001  the boundary of one worker: the others are not left alone
                failed.append(error)
        if failed:
            raise ExceptionGroup("cannot inspect workers", failed)

    def _look_at(self, place: Place) -> None:
        process = place.process
        if process is None or process.asked_to_end or process.why_killed:
            return
        if place.is_ready:
            self._ping(place, process)
        elif place.life.state is State.STARTING and (why := self._why_loads_no_more(process)):
            _kill(place, process, why)

    def judge_step(self, place: Place, pong: wire.Pong) -> None:
        """Kill a worker whose step takes too long."""
        process = place.process
        if pong.busy_s > self._health.step_timeout_s and process is not None and not process.why_killed:
            _kill(place, process, f"one step has taken {pong.busy_s:.0f} s")

    def _ping(self, place: Place, process: WorkerProcess) -> None:
        has_ranks, seen = place.slot.spec.has_ranks, Standstill()
        if has_ranks or place.unanswered:
            seen = process.look("ranks" if has_ranks else "itself")
        if seen.is_out_of_sight:
            place.unanswered = 0
        is_idle = has_ranks or seen.idle_looks >= IDLE_LOOKS  # its ranks compute while they wait for it
        if place.unanswered >= self._allowed and is_idle:
            _kill(place, process, f"no ping reply for {self._health.ping_timeout_s:.0f} s")
        elif place.unanswered >= max(self._allowed, self._health.step_timeout_s / self.interval_s):
            _kill(place, process, f"computing, but no ping reply for {self._health.step_timeout_s:.0f} s")
        elif has_ranks and seen.stopped_looks >= self._allowed:
            _kill(place, process, f"one of its ranks was stopped (SIGSTOP) for {self._health.ping_timeout_s:.0f} s")
        else:
            place.unanswered += 1
            process.send(wire.Ping(time.monotonic()))

    def _why_loads_no_more(self, process: WorkerProcess) -> str:
        seen, doing = process.look("all"), process.doing or "starting"
        if seen.stopped_looks >= self._allowed:
            return f"stopped (SIGSTOP) for {self._health.ping_timeout_s:.0f} s while {doing}"
        if seen.idle_looks * self.interval_s >= self._health.load_stall_s:
            return f"computed and read nothing for {self._health.load_stall_s:.0f} s while {doing}"
        return ""


def _kill(place: Place, process: WorkerProcess, why: str) -> None:
    log.error("%s hung, killing it: %s", place.slot.worker, why)
    process.kill(why)
