"""The boundaries in force: measured at the first start or when asked for, saved, and read at later starts.

Owns the file and the order of the measurements; the workers measure.  A user's request comes first: nothing is measured
while there is one, and what was begun is given up when one comes.

    start ──► saved for this very machine, model and configuration? ── yes ──► in force
                 │ no: the defaults are in force; once nobody has been there for a while
                 └──► one batch size of one worker after the other, then links (`driver_boundaries_links`) ──► saved
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from melld.control.messages import Profiled
from melld.driver.links import measure_links
from melld.engine.fleet.fleet import Fleet
from melld.engine.wire import messages as wire
from melld.errors import MelldError
from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries, Pair, PrefillTable, Segment
from melld.migrate.planner import Planner

log = logging.getLogger("melld.boundaries")
FILE = "boundaries.json"
BATCHES = (0, 1, 4, 16)
QUIET_S = 10.0
"""Nobody has been there for so long: then it is measured unasked."""
PREFILL_S = 40.0
"""What all workers may take together: with the links, and what an answer may be late, a minute."""
MOST_PREFILL_S = 3.0
ANSWER_S = 5.0


class NotMeasured(MelldError):
    """Nothing was measured: requests are running, or it is being measured already."""

    status = 409
    code = "not_measured"


class BoundarySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`fingerprint`: what the figures depend on, in words.  `share`: by how much a step may become longer.

    `segments`: what some links may share.  Until that is measured, each is taken to carry as much as one link.
    """

    directory: Path
    fingerprint: Mapping[str, str]
    epoch_s: float
    share: float
    read: bool
    """Figures that were saved count."""
    measure_unasked: bool
    segments: tuple[Segment, ...] = ()


class BoundaryKeeper:
    """One fleet's boundaries; those that were saved on such a machine are in force at once."""

    def __init__(self, fleet: Fleet, planner: Planner, settings: BoundarySettings, clock: Callable[[], float]) -> None:
        self.profiled: Profiled | None = None
        self._fleet = fleet
        self._planner = planner
        self._settings = settings
        self._clock = clock
        self._busy = False
        self._file = settings.directory / FILE
        planner.respect(msgspec.structs.replace(planner.boundaries, segments=settings.segments))
        self._load()

    # -- saved -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Put what was saved in force, if it was measured on such a machine with such a model and configuration."""
        if not self._settings.read:
            return
        try:
            saved = msgspec.json.decode(self._file.read_bytes(), type=Profiled)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s cannot be used: %s", self._file, error)
            return
        changed = [key for key, value in self._settings.fingerprint.items() if saved.fingerprint.get(key) != value]
        if changed:
            log.info("%s was measured under other conditions (%s): not used", self._file, ", ".join(changed))
        else:
            self._adopt(saved)

    def _save(self, profiled: Profiled) -> None:
        text = msgspec.json.format(msgspec.json.encode(profiled), indent=2)
        fresh = self._file.with_name(FILE + ".new")
        try:
            fresh.write_bytes(text + b"\n")
            fresh.replace(self._file)
        except OSError as error:
            log.warning("the boundaries were measured and could not be saved: %s", error)

    def _adopt(self, profiled: Profiled) -> None:
        self.profiled = profiled
        self._planner.respect(profiled.boundaries.for_epochs_of(self._settings.epoch_s))
        log.debug("boundaries: %s", self.line())

    # -- shown -------------------------------------------------------------------------------------------------------

    def report(self) -> Profiled:
        """What is in force."""
        if self.profiled is not None:
            return self.profiled
        defaults = self._planner.boundaries
        return Profiled(boundaries=defaults, fingerprint=dict(self._settings.fingerprint), file=str(self._file))

    def line(self) -> str:
        """For `melld status`."""
        return self.report().in_one_line()

    # -- measured ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure unasked, once, when nobody is there; again later if somebody came."""
        if self.profiled is not None or not self._settings.measure_unasked:
            return
        quiet_since_s = self._clock()
        while self.profiled is None:
            await asyncio.sleep(1.0)
            if self._fleet.live:
                quiet_since_s = self._clock()
            elif self._clock() - quiet_since_s >= QUIET_S:
                try:
                    await self.measure()
                except NotMeasured as error:
                    log.debug("the boundaries were not measured: %s", error)
                    quiet_since_s = self._clock()

    async def measure(self) -> Profiled:
        """Measure what there is, save it and put it in force: at most a minute.

        Raises:
            NotMeasured: there are requests, or came.
        """
        if self._busy:
            raise NotMeasured("it is being measured")
        self._busy = True
        try:
            began_s = self._clock()
            notes: list[str] = []
            workers = sorted(worker for worker in self._fleet.workers if self._fleet.is_ready(worker))
            prefill = {worker: await self._prefill(worker, len(workers), notes) for worker in workers}
            found = await measure_links(
                workers, self._settings.segments, lambda pair, seconds: self._link(pair, seconds, notes)
            )
            boundaries = Boundaries(
                epoch_s=self._settings.epoch_s,
                links=found.links,
                ports_out=found.ports_out,
                ports_in=found.ports_in,
                segments=found.segments,
                prefill={worker: table for worker, table in prefill.items() if table},
            )
            profiled = Profiled(
                boundaries=boundaries,
                fingerprint=dict(self._settings.fingerprint),
                file=str(self._file),
                measured_unix_s=time.time(),
                took_s=round(self._clock() - began_s, 3),
                notes=tuple(notes),
            )
            await asyncio.to_thread(self._save, profiled)
            self._adopt(profiled)
            return profiled
        finally:
            self._busy = False

    async def _prefill(self, worker: WorkerId, workers: int, notes: list[str]) -> PrefillTable:
        """One worker's table; empty where it could not be measured beside a request: the defaults are more careful."""
        seconds = min(MOST_PREFILL_S, PREFILL_S / (workers * len(BATCHES)))
        table: list[tuple[int, int]] = []
        for batch in BATCHES:
            measured = await self._ask(
                worker,
                lambda call, batch=batch: wire.MeasurePrefill(  # type: ignore[misc]
                    call=call, batch=batch, share=self._settings.share, seconds=seconds
                ),
                seconds,
                notes,
            )
            if measured is None:
                break
            found = msgspec.convert(measured, wire.PrefillMeasured)
            table.append((batch, max(int(found.tokens / found.seconds * self._settings.epoch_s), 1)))
        return tuple(table) if len(table) > 1 else ()

    async def _link(self, pair: Pair, seconds: float, notes: list[str]) -> int | None:
        """Bytes per epoch from the one worker to the other."""
        source, destination = pair
        blocks = self._fleet.ready[source].total_blocks
        measured = await self._ask(
            destination,
            lambda call: wire.MeasureLink(call=call, peer=source, blocks=blocks, seconds=seconds),
            seconds,
            notes,
        )
        if measured is None:
            return None
        found = msgspec.convert(measured, wire.LinkMeasured)
        return max(int(found.nbytes / max(found.seconds, 1e-9) * self._settings.epoch_s), 1)

    async def _ask(
        self, worker: WorkerId, make: Callable[[int], msgspec.Struct], seconds: float, notes: list[str]
    ) -> Any:
        """The worker's answer; None, and a note, where it has none.

        Raises:
            NotMeasured: there are requests.
        """
        if self._fleet.live:
            raise NotMeasured("requests are running")
        try:
            return await self._fleet.calls.ask(worker, make, 3 * seconds + ANSWER_S)
        except (RuntimeError, TimeoutError) as error:
            if self._fleet.live or str(error) == wire.WANTED:
                raise NotMeasured("a request came") from error
            notes.append(f"{worker}: {error or 'it did not answer in time'}")
            return None
