"""The boundaries in force: measured after the first start or on demand, saved, and read at later starts.

Owns the file and the order of the measurements; the workers measure.  Users' requests come first: nothing is measured
while one runs, and a request that arrives ends the measurement.

    start ──► saved for this machine, model and configuration? ── yes ──► in force
                 │ no: the defaults are in force; once no request has run for a while
                 └──► each worker with each batch size, one at a time, then links (`driver/links`) ──► saved
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from melld.control.messages import Profiled
from melld.driver.links import measure_links
from melld.engine.fleet.fleet import Fleet
from melld.engine.wire import messages as wire
from melld.errors import MelldError
from melld.ids import WorkerId
from melld.migrate.boundaries import Pair, PrefillTable, Segment
from melld.migrate.planner import Planner
from melld.migrate.topology import segments_of_machines

log = logging.getLogger("melld.boundaries")
BATCHES = (0, 1, 4, 16)
QUIET_S = 10.0
"""Seconds without a request before melld measures unasked."""
PREFILL_S = 40.0
"""Time for the prefills of all workers: with the links and late answers, a measurement takes at most a minute."""
MOST_PREFILL_S = 3.0
ANSWER_S = 5.0


class NotMeasured(MelldError):
    """The boundaries cannot be measured now."""

    status = 409
    code = "not_measured"

    def __init__(self, why: str) -> None:
        super().__init__(f"nothing was measured: {why}")


class BoundarySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurements.

    `fingerprint`: what the figures depend on, in words.  `share`: the part by which a step may become longer.
    `segments`: what links may share; until it is measured, each is taken to carry as much as one link.
    """

    file: Path
    """Where figures are kept."""
    fingerprint: Mapping[str, str]
    epoch_s: float
    share: float
    read: bool
    """Use saved figures."""
    measure_unasked: bool
    segments: tuple[Segment, ...] = ()


class BoundaryKeeper:
    """A fleet's boundaries.  Saved ones that were measured under the same conditions are in force at once."""

    def __init__(self, fleet: Fleet, planner: Planner, settings: BoundarySettings, clock: Callable[[], float]) -> None:
        self.profiled: Profiled | None = None
        self._fleet = fleet
        self._planner = planner
        self._settings = settings
        self._clock = clock
        self._busy = False
        self._measured: set[WorkerId] = set()
        planner.respect(msgspec.structs.replace(planner.boundaries, segments=settings.segments))
        self._load()

    # -- saved -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Put the saved figures in force if they were measured under the same conditions."""
        if not self._settings.read:
            return
        try:
            saved = msgspec.json.decode(self._settings.file.read_bytes(), type=Profiled)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s cannot be used, keeping the default boundaries: %s", self._settings.file, error)
            return
        changed = [key for key, value in self._settings.fingerprint.items() if saved.fingerprint.get(key) != value]
        if changed:
            log.info(
                "%s was measured under other conditions (%s), ignoring it", self._settings.file, ", ".join(changed)
            )
        else:
            self._adopt(saved)

    def _save(self, profiled: Profiled) -> None:
        text = msgspec.json.format(msgspec.json.encode(profiled), indent=2)
        fresh = self._settings.file.with_name(f"{self._settings.file.name}.new")
        try:
            fresh.write_bytes(text + b"\n")
            fresh.replace(self._settings.file)
        except OSError as error:
            log.warning("cannot save the measured boundaries, using them until the daemon stops: %s", error)

    def _adopt(self, profiled: Profiled) -> None:
        self.profiled = profiled
        self._planner.respect(profiled.boundaries.for_epochs_of(self._settings.epoch_s))
        log.debug("boundaries: %s", self.line())

    # -- shown -------------------------------------------------------------------------------------------------------

    def report(self) -> Profiled:
        """Return the boundaries in force."""
        if self.profiled is not None:
            return self.profiled
        defaults = self._planner.boundaries
        return Profiled(
            boundaries=defaults, fingerprint=dict(self._settings.fingerprint), file=str(self._settings.file)
        )

    def line(self) -> str:
        """Return the boundaries in force as one line for `melld status`."""
        return self.report().in_one_line()

    # -- measured ----------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True before the first measurement, and for workers of a machine that has joined since.

        KV goes to another machine only over what was measured.  Nothing is to be known where no request moves.
        """
        if not self._moves:
            return False
        far = {worker for worker, ready in self._fleet.ready.items() if ready.far_kv_handle}
        return self.profiled is None or not far <= self._measured

    @property
    def _moves(self) -> bool:
        """Return True if requests of the model may move, as far as that is known: those that pool stay."""
        ready = self._fleet.last_ready
        return ready is None or ready.generates

    async def run(self) -> None:
        """Measure unasked what is due, when no request has run for a while; try again if one comes meanwhile."""
        if not self._settings.measure_unasked:
            return
        quiet_since_s = self._clock()
        while True:
            await asyncio.sleep(1.0)
            if self._fleet.live or not self.is_due():
                quiet_since_s = self._clock()
            elif self._clock() - quiet_since_s >= QUIET_S:
                try:
                    await self.measure()
                except NotMeasured as error:
                    log.debug("boundaries: %s", error)
                    quiet_since_s = self._clock()

    async def measure(self) -> Profiled:
        """Measure all workers and links, save the figures and put them in force; takes at most a minute.

        Raises:
            NotMeasured: a request runs or arrives, another measurement runs, or no request would move.
        """
        if not self._moves:
            raise NotMeasured("requests that embed, score or classify never move, and nothing else needs the figures")
        if self._busy:
            raise NotMeasured("another measurement is running and ends within a minute")
        self._busy = True
        try:
            began_s = self._clock()
            notes: list[str] = []
            workers = sorted(worker for worker in self._fleet.workers if self._fleet.is_ready(worker))
            prefill = {worker: await self._prefill(worker, len(workers), notes) for worker in workers}
            machines = {worker: self._fleet.places[worker].slot.machine for worker in workers}
            segments = (*self._settings.segments, *segments_of_machines(machines, 0))
            found = await measure_links(workers, segments, lambda pair, seconds: self._link(pair, seconds, notes))
            tables = {worker: table for worker, table in prefill.items() if table}
            profiled = Profiled(
                boundaries=msgspec.structs.replace(found, epoch_s=self._settings.epoch_s, prefill=tables),
                fingerprint=dict(self._settings.fingerprint),
                file=str(self._settings.file),
                measured_unix_s=time.time(),
                took_s=round(self._clock() - began_s, 3),
                notes=tuple(notes),
            )
            self._measured.update(workers)
            await asyncio.to_thread(self._save, profiled)
            self._adopt(profiled)
            return profiled
        finally:
            self._busy = False

    async def _prefill(self, worker: WorkerId, workers: int, notes: list[str]) -> PrefillTable:
        """Measure one worker's table; empty if not even one request leaves room: the defaults are more careful.

        A busier worker computes no more for moves: where it seems to, a figure was disturbed, and the lower one stands.
        """
        seconds = min(MOST_PREFILL_S, PREFILL_S / (workers * len(BATCHES)))
        table: list[tuple[int, int]] = []
        for batch in BATCHES:
            tokens = await self._ask(
                worker,
                lambda call, batch=batch: wire.MeasurePrefill(  # type: ignore[misc]
                    call=call, batch=batch, share=self._settings.share, seconds=seconds
                ),
                seconds,
                notes,
            )
            if tokens is None:
                break
            table.append((batch, min(tokens, table[-1][1]) if table else tokens))
        return tuple(table) if len(table) > 1 else ()

    async def _link(self, pair: Pair, seconds: float, notes: list[str]) -> int | None:
        """Measure the bytes per epoch from one worker to the other; None if there is none, or it cannot be measured."""
        source, destination = pair
        ready = self._fleet.ready.get(source)  # it may have ended since the measurement began
        if ready is None or not (ready.far_kv_handle or self._fleet.are_near(source, destination)):
            return None
        return await self._ask(
            destination,
            lambda call: wire.MeasureLink(call=call, peer=source, blocks=ready.total_blocks, seconds=seconds),
            seconds,
            notes,
        )

    async def _ask(
        self, worker: WorkerId, make: Callable[[int], msgspec.Struct], seconds: float, notes: list[str]
    ) -> int | None:
        """Return what the worker can do in an epoch, at least 1; None, and a note, if it cannot measure it.

        Raises:
            NotMeasured: a request runs or arrives.
        """
        if self._fleet.live:
            raise NotMeasured("requests are running; try again when none are")
        try:
            per_s = await self._fleet.calls.ask(worker, make, 3 * seconds + ANSWER_S)
        except (RuntimeError, TimeoutError) as error:
            if self._fleet.live or str(error) == wire.WANTED:
                raise NotMeasured("a request arrived; try again when none are running") from error
            notes.append(f"{worker}: {str(error) or 'no answer in time'}")
            return None
        return max(int(per_s * self._settings.epoch_s), 1)
