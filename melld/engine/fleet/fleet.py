"""All workers as one engine: requests come in, workers compute them, tokens go out, even when workers die.

Wires its collaborators, and passes on what workers say.  Decides nothing: facts go out as events, decisions come back
as calls of `place` and its like.  Never imports vLLM: what only vLLM can read goes through `Codec`.

    admit ──► RequestArrived ──► driver ──► place ──► Requests ──AddRequest──► worker
                                                                                 │
    outputs ◄── the owner's, under the valid lease ◄── Reports ◄────StepDone─────┘
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from melld.config import HealthConfig
from melld.engine.fleet.calls import Calls
from melld.engine.fleet.lending import Lending
from melld.engine.fleet.notices import Notices
from melld.engine.fleet.place import Offer, Place, Slot
from melld.engine.fleet.ports import Codec, FleetListener
from melld.engine.fleet.process import WorkerEnded
from melld.engine.fleet.reports import Reports, Turn
from melld.engine.fleet.request import Live, RequestNotTaken
from melld.engine.fleet.requests import Requests
from melld.engine.fleet.step_outputs import Step, StepOutputs
from melld.engine.fleet.supervisor import Supervisor
from melld.engine.host.intake import Intake
from melld.engine.host.ports import Host
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.errors import UnknownWorker
from melld.ids import RequestId, WorkerId
from melld.kvstore.ledger import Ledger
from melld.migrate.messages import MoveMessage
from melld.scheduler import events

log = logging.getLogger("melld.fleet")


class Fleet:
    """The workers of one model, and their requests.

    `listener()` hears of every event at once, before anything else acts on it.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        host: Host,
        codec: Codec,
        listener: Callable[[], FleetListener],
        clock: Callable[[], float],
        health: HealthConfig | None = None,
        itl_target_s: float | None = None,
        is_prefix_aware: bool = False,
    ) -> None:
        intake = Intake()
        self.outputs = StepOutputs(intake.pause, intake.resume, intake.is_behind)
        self.supervisor = Supervisor(slots, host, self, health or HealthConfig(), intake)
        self.places: Mapping[WorkerId, Place] = self.supervisor.places
        self.ledger = Ledger()
        self.live: dict[RequestId, Live] = {}
        self.ready: dict[WorkerId, wire.WorkerReady] = {}
        self.last_ready: wire.WorkerReady | None = None
        """What the worker that was ready last has said of its engine; it may have ended since."""
        self.reports = Reports(self.live, self.ledger, self._limit_slots, itl_target_s)
        self.calls = Calls(self.send)
        self.lending = Lending(self.send, lambda: self.supervisor.owner)
        self.workers = self.reports.workers
        self._notices = Notices(lambda event: listener().handle(event))
        self.tell = self._notices.tell
        self.requests = Requests(
            self.live, self.supervisor, self.reports, self._notices, codec, listener, clock, self.send, self.is_ready
        )
        self._is_prefix_aware = is_prefix_aware
        self._codec = codec
        self._listener = listener
        self._clock = clock

    async def load_adapter(self, adapter: Any) -> bool:
        """Have every ready worker load this adapter, a `LoRARequest` of vLLM's; return True if all did.

        One that ends meanwhile does not count: its next process loads the adapter before its first request with it.

        Raises:
            RuntimeError: a worker cannot load it.
        """
        ready = filter(self.is_ready, self.workers)
        asked = [self.calls.begin(worker, lambda call: wire.LoadAdapter(call, adapter)) for worker in ready]
        return all(await asyncio.gather(*asked))

    # -- called by the driver and the executor of migrations --------------------------------------------------------

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write to a worker's wire; drop the message if the worker is not ready."""
        if (process := self.supervisor.process(worker)) is not None:
            process.send(message, payload)

    def is_ready(self, worker: WorkerId) -> bool:
        """Return True if the worker takes requests at once; otherwise requests placed on it are held until it does."""
        return worker in self.workers and self.supervisor.process(worker) is not None

    def reserve(self, request: RequestId, worker: WorkerId, tokens: int) -> None:
        """Reserve room for that many tokens of the request on the worker, until `ledger.release`."""
        if (facts := self.workers.get(worker)) is not None:
            self.ledger.reserve(worker, request, facts.geometry.blocks_for_tokens(tokens))

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End the process of a worker that runs nothing.  The scheduler keeps it and may have it woken.

        If the worker still has requests, they resume elsewhere from their tokens once its process has ended, and it
        is started again unless it is to `stay_out` of service.
        """
        self.supervisor.stop_worker(worker, stay_out=stay_out)
        self.supervisor.owner.worker_rests(worker, self)

    def announce(self, worker: WorkerId, offer: Offer) -> None:
        """See `Offers`."""
        self._notices.tell_all(self.places[worker].announce(offer, self._clock()))

    def place_of(self, worker: WorkerId) -> Place:
        """Return the worker's place.

        Raises:
            UnknownWorker: no worker has that name.
        """
        if worker not in self.places:
            raise UnknownWorker(worker, list(self.places))
        return self.places[worker]

    def are_near(self, worker: WorkerId, other: WorkerId) -> bool:
        """Return True if both workers are on one machine."""
        return self.places[worker].slot.machine == self.places[other].slot.machine

    def _limit_slots(self, worker: WorkerId, slots: int) -> None:
        """Tell the scheduler to cap the worker at `slots` requests."""
        self.change(worker, slots=slots)

    def withdraw(self, worker: WorkerId) -> None:
        """Withdraw a worker that is not ready from the scheduler; place its waiting requests elsewhere."""
        with self._notices.at_once():
            self._notices.tell_all(self.places[worker].leave(self._clock()))
            self._listener().executor.worker_lost(worker)
            self.requests.displace(worker)

    def change(self, worker: WorkerId, **changes: Any) -> None:
        """Tell the scheduler what changes of what the worker offers; see `Offer`."""
        self._notices.tell_all(self.places[worker].change(self._clock(), **changes))

    def introduce(self, worker: WorkerId, offer: Offer) -> None:
        """Tell the scheduler of an owned worker that it does not know."""
        self._notices.tell_all(self.places[worker].introduce(offer, self._clock()))

    @contextlib.contextmanager
    def losing(self, workers: Collection[WorkerId], why: str) -> Iterator[None]:
        """Lose these workers together with their machine, as one event; the block reports each process's end.

        None is started before `supervisor.bring_back`.
        """
        with self._notices.at_once():
            with self.supervisor.losing(workers, why):
                yield
            for worker in workers:
                if self.places[worker].offer is not None:  # it had no process, and the scheduler would wake it
                    self.withdraw(worker)

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """Handle a worker's message."""
        match message:
            case wire.StepDone():
                self._step_done(slot.worker, message, payload)
            case wire.WorkerReady():
                self._worker_ready(slot, message)
            case wire.UtilityDone():
                self.calls.answered(message.call, message.result, message.error)
            case wire.LinkOpened() | MoveMessage():
                self._listener().executor.answered(slot.worker, message, payload)
            case wire.LinkClosed():
                self.lending.link_closed(slot.worker, WorkerId(message.peer))
            case wire.GranulesReturned():
                self.lending.returned(slot.worker, message)
            case wire.RequestTaken():
                self.requests.taken(message)
            case wire.RequestRejected():
                self._rejected(slot.worker, message)

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """Have a dead worker's requests resume elsewhere from their log; fail those that killed too many workers."""
        worker = slot.worker
        siblings = tuple(self.ready) if self.ready.pop(worker, None) is not None else ()
        self.requests.prefixes.close_worker(worker)
        self.calls.worker_lost(worker)
        held = self.places[worker].held
        is_known = ended.expected and all(live.request in held for live in self.requests.of(worker))
        with self._notices.at_once():
            if is_known:
                self.supervisor.owner.worker_rests(worker, self)
            else:
                self._notices.tell_all(self.places[worker].leave(self._clock()))
            if self.reports.worker_lost(worker):
                self._listener().executor.worker_lost(worker)
            if not is_known:
                self.requests.displace(worker, ended)
        self.lending.worker_ended(worker, siblings)

    def worker_steadied(self, slot: Slot) -> None:
        """Tell the scheduler that the worker has run long enough since its last death to be trusted again."""
        self._listener().handle(events.WorkerSteadied(self._clock(), worker=slot.worker))

    def _worker_ready(self, slot: Slot, ready: wire.WorkerReady) -> None:
        worker = slot.worker
        self.ready[worker] = self.last_ready = ready
        self.reports.worker_ready(worker, ready)
        if ready.caches_prefixes and self._is_prefix_aware:
            self.requests.prefixes.open_worker(worker, ready.geometry.block_tokens, ready.total_blocks)
        self.requests.give_held(worker)
        self.supervisor.owner.worker_ready(worker, ready, self)
        self._listener().executor.worker_ready(worker, ready)

    def _step_done(self, worker: WorkerId, done: wire.StepDone, payload: list[bytes]) -> None:
        if (facts := self.workers.get(worker)) is None:
            return  # it was asked to end before it was ready
        if (turn := facts.turn(done.step)) is not Turn.NEXT:
            self._out_of_turn(worker, done.step, turn)
            return
        step = None
        if payload or done.tokens:
            step = Step(done.tokens, timestamp=done.timestamp_s, engine_index=facts.index)
            if payload:
                rest = self._codec.decode_outputs(payload)
                step.outputs, step.scheduler_stats = rest.outputs, rest.scheduler_stats
        reported = self.reports.take(worker, done, step, self._clock())
        for request, gap_s in reported.gaps_s.items():
            self._listener().executor.resumed(request, gap_s)
            if gap_s is not None:
                cause = self.live[request].cause
                self.tell(events.RequestResumed(self._clock(), request=request, pause_s=gap_s, cause=cause))
        for request in reported.acquitted:
            self.requests.acquit(request)
        for request in reported.finished:
            self.requests.finish(request)
        if step is not None:
            if reported.gaps_s:
                self.outputs.seal()
            self.outputs.put_step(worker, step)

    def _rejected(self, worker: WorkerId, rejected: wire.RequestRejected) -> None:
        """Fail the request, unless it has since left the worker and continues elsewhere."""
        live = self.reports.owned(RequestId(rejected.request), worker)
        if live is not None and live.cause == rejected.cause:
            told = worker, rejected.request, rejected.cause, rejected.reason
            log.error("%s rejected request %s, placed there on event #%d: %s", *told)
            self.requests.fail(live.request, RequestNotTaken(rejected.request, rejected.reason))

    def _out_of_turn(self, worker: WorkerId, step: int, turn: Turn) -> None:
        """Drop a repeated report; after a gap kill the worker, so that its requests resume from the log."""
        log.error("%s: report %d is out of order (%s)", worker, step, turn)
        process = self.supervisor.process(worker)
        if turn is Turn.GAP and process is not None:
            process.kill()
