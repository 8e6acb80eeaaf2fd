"""Has workers doze for their owner: the process stays, without weights and KV memory, until it is woken.

Owns the asking and its deadline.  To all but the supervisor a worker that dozes has ended, and one that wakes is new.
"""

import asyncio
import logging
from collections.abc import Callable

from melld.control.status import WorkerState
from melld.engine.fleet.place import Place
from melld.engine.fleet.ports import WorkerListener
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.wire import messages as wire
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")
DOZE_DEADLINE_S = 300.0
"""A worker that does not doze by then is stopped.  A GPU's weights need 0.7 s per GB (seen on an H200)."""


class Dozing:
    """The dozing of one fleet's workers.  `stop` stops one that cannot."""

    def __init__(self, listener: WorkerListener, stop: Callable[[WorkerId], None]) -> None:
        self._listener = listener
        self._stop = stop
        self._deadlines: dict[WorkerId, asyncio.TimerHandle] = {}

    def ask(self, place: Place) -> None:
        """Have the worker doze once its requests have ended; the listener hears an expected `WorkerEnded`."""
        if place.may("doze") and place.process is not None:
            place.step("doze")
            place.dozing_bytes = None
            place.process.send(wire.Doze())
            deadline = asyncio.get_running_loop().call_later(DOZE_DEADLINE_S, self._late, place, place.process)
            self._deadlines[place.slot.worker] = deadline

    def stop(self, place: Place) -> None:
        """Have a worker that goes to doze answer at once: its model is wanted."""
        if place.state is WorkerState.DOZING and place.dozing_bytes is None and place.process is not None:
            place.process.send(wire.StopDozing())

    def _late(self, place: Place, process: WorkerProcess) -> None:
        if place.process is process:
            self.answered(place, wire.Dozed(failure=f"no answer for {DOZE_DEADLINE_S:g} s"))

    def answered(self, place: Place, dozed: wire.Dozed) -> None:
        """Tell of a worker that dozes; stop one that cannot."""
        worker = place.slot.worker
        self._deadlines[worker].cancel()
        if place.state is not WorkerState.DOZING:
            return  # it is being stopped
        if dozed.failure:
            log.info("%s cannot doze, stopping it: %s", worker, dozed.failure)
            self._stop(worker)
            return
        place.dozing_bytes = dozed.resident_bytes
        self._listener.worker_ended(place.slot, WorkerEnded(worker, "it dozes", expected=True))
