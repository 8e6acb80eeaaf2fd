"""All workers as one engine: requests come in, workers compute them, tokens go out, even when workers die.

Owns the unfinished requests and wires its collaborators.  Decides nothing: facts go out as events, decisions come back
as calls of `place` and its like.  Never imports vLLM: what only vLLM can read goes through `Codec`.

    admit ──► RequestArrived ──► driver ──► place ──► Delivery ──AddRequest──► worker
                                                                                 │
    outputs ◄── the owner's, under the valid lease ◄── Reports ◄────StepDone─────┘
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from melld.config import HealthConfig
from melld.engine.fleet.calls import Calls
from melld.engine.fleet.delivery import Delivery
from melld.engine.fleet.lending import Lending
from melld.engine.fleet.notices import Notices
from melld.engine.fleet.place import Offer, Place, Slot
from melld.engine.fleet.ports import Codec, FleetListener, WorkerOwner
from melld.engine.fleet.process import WorkerEnded
from melld.engine.fleet.reports import Reports, Turn
from melld.engine.fleet.request import Live, RequestKilledWorkers, RequestNotTaken, new_live, prefix_salt
from melld.engine.fleet.supervisor import Supervisor
from melld.engine.host.ports import Host
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.errors import MelldError, UnknownWorker
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.kvstore.ledger import Ledger
from melld.kvstore.prefixes import PrefixIndex
from melld.migrate.messages import MoveMessage
from melld.scheduler import events

log = logging.getLogger("melld.fleet")

Failures = asyncio.Queue[tuple[RequestId, MelldError]]
"""Admitted requests that ended with an error, and the error."""


class Fleet:
    """The requests of all workers.

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
        owner: WorkerOwner | None = None,
    ) -> None:
        self.supervisor = Supervisor(slots, host, self, health or HealthConfig(), owner)
        self.places: Mapping[WorkerId, Place] = self.supervisor.places
        self.start_worker = self.supervisor.start_worker
        self.sleep = self.supervisor.sleep
        self.doze = self.supervisor.doze
        self.wake = self.supervisor.wake
        self.ledger = Ledger()
        self.live: dict[RequestId, Live] = {}
        self.ready: dict[WorkerId, wire.WorkerReady] = {}
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.failures: Failures = asyncio.Queue()
        self.reports = Reports(self.live, self.ledger, self._limit_slots, itl_target_s)
        self.calls = Calls(self.send)
        self.lending = Lending(self.send, owner)
        self.grant = self.lending.grant
        self.take = self.lending.take
        self._delivery = Delivery(self.live, self.send)
        self._notices = Notices(lambda event: listener().handle(event))
        self.tell = self._notices.tell
        self.workers = self.reports.workers
        self._prefixes = PrefixIndex()
        self._is_prefix_aware = is_prefix_aware
        self._codec = codec
        self._listener = listener
        self._clock = clock

    # -- called by the front end ------------------------------------------------------------------------------------

    def admit(self, core_request: Any, client: str = "") -> None:
        """Admit a client's request (vLLM's `EngineCoreRequest`); its tokens come through `outputs`.

        Raises:
            RequestTooLarge, InputTooLarge, QueueFull: it fits no worker or no frame, or the queue is full; nothing is
                kept.
        """
        live = new_live(core_request, self._codec.encode_request, self._clock())
        self.live[live.request] = live
        cached_tokens: Mapping[WorkerId, int] = {}
        if self._is_prefix_aware:
            tokens = core_request.prompt_token_ids or ()
            cached_tokens = self._prefixes.arrived(live.request, tokens, prefix_salt(core_request))
        self._listener().handle(
            events.RequestArrived(
                self._clock(),
                request=live.request,
                kv_bytes=self.reports.kv_bytes(live.prompt_tokens + 1),
                prompt_tokens=live.prompt_tokens,
                priority=live.priority,
                client=client,
                cached_tokens=cached_tokens,
            )
        )
        if live.refusal is not None:
            self._remove(live.request)
            raise live.refusal
        live.admitted = True

    def abort(self, requests: Iterable[str]) -> None:
        """Drop these requests and free their blocks on every worker; ignore unknown ones."""
        by_worker: dict[WorkerId, list[str]] = {}
        ended = []
        for name in requests:
            live = self._remove(RequestId(name))
            if live is None:
                continue
            ended.append(live)
            if live.worker is not None:
                by_worker.setdefault(live.worker, []).append(name)
        for worker, names in by_worker.items():
            self.send(worker, wire.AbortRequests(requests=names))
        for live in ended:
            self._tell_ended(live)

    async def call_all(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call one of `wire.UTILITIES` on every ready worker and return the results.

        Raises:
            RuntimeError: a worker's call failed, or the worker ended first.
        """
        if method == "reset_prefix_cache":
            self._prefixes.clear()
        return await self.calls.ask_all(filter(self.is_ready, self.workers), method, arguments)

    # -- called by the driver and the executor of migrations --------------------------------------------------------

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write to a worker's wire; drop the message if the worker is not ready."""
        process = self.supervisor.process(worker)
        if process is not None:
            process.send(message, payload)

    def reserve(self, request: RequestId, worker: WorkerId, tokens: int) -> None:
        """Reserve room for that many tokens of the request on the worker, until `ledger.release`."""
        if (facts := self.workers.get(worker)) is not None:
            self.ledger.reserve(worker, request, facts.geometry.blocks_for_tokens(tokens))

    def hand_over(self, request: RequestId, worker: WorkerId, lease: int, cause: EventId = NO_EVENT) -> None:
        """Make the worker the request's owner under this lease: the commit of a migration."""
        self.live[request].hand_over(worker, lease, cause)
        self._prefixes.placed(request, worker)
        self._delivery.acquit(request)

    def place(self, request: RequestId, worker: WorkerId, cause: EventId = NO_EVENT) -> None:
        """Start the request on the worker, or resume it there from its known tokens."""
        live = self.live[request]
        live.worker, live.cause = worker, cause
        if self.is_ready(worker):
            self._give(live, worker)
            return
        live.taken = False
        self.places[worker].held.append(request)
        self.wake(worker)

    def suspend(self, request: RequestId) -> None:
        """Drop the request from its worker; it resumes from its known tokens where it is placed next."""
        live = self.live[request]
        worker = live.worker
        if worker is None:
            return
        if request in (held := self.places[worker].held):
            held.remove(request)
        self.send(worker, wire.AbortRequests(requests=[request], may_return=True))
        live.leave_worker()
        live.suspensions += 1
        self._delivery.acquit(request)

    def _give(self, live: Live, worker: WorkerId) -> None:
        self._prefixes.placed(live.request, worker)
        self._delivery.give(live, worker)

    def is_ready(self, worker: WorkerId) -> bool:
        """Return True if the worker takes requests at once; otherwise requests placed on it are held until it does."""
        return worker in self.workers and self.supervisor.process(worker) is not None

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End the process of a worker that runs nothing.  The scheduler keeps it and may have it woken.

        If the worker still has requests, they resume elsewhere from their tokens once its process has ended, and it
        is started again unless it is to `stay_out` of service.
        """
        self.supervisor.stop_worker(worker, stay_out=stay_out)
        self._notices.tell_all(self.places[worker].rest(self._clock()))

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
        self._notices.tell_all(self.places[worker].limit(slots, self._clock()))

    def end(self, request: RequestId, error: MelldError) -> None:
        """End the request with this error: `admit` raises it, or `failures` carries it if the request is admitted."""
        live = self.live.get(request)
        if live is not None and not live.admitted:
            live.refusal = error
        else:
            self._fail(request, error)

    def withdraw(self, worker: WorkerId) -> None:
        """Take a worker that is not ready from the scheduler; place the requests that wait for it elsewhere."""
        with self._notices.at_once():
            self._notices.tell_all(self.places[worker].leave(self._clock()))
            self._listener().executor.worker_lost(worker)
            self._delivery.worker_lost(worker)
            for live in self.live.values():
                if live.worker == worker:
                    live.leave_worker()

    def limit_capacity(self, worker: WorkerId, capacity_bytes: int) -> None:
        """Tell the scheduler to plan with this capacity on the worker, until the next call."""
        self._notices.tell_all(self.places[worker].resize(capacity_bytes, self._clock()))

    def introduce(self, worker: WorkerId, offer: Offer) -> None:
        """Tell the scheduler of an owned worker that it does not know."""
        self._notices.tell_all(self.places[worker].introduce(offer, self._clock()))

    def lend(self, worker: WorkerId, capacity_bytes: int, wake_s: float) -> None:
        """Tell the scheduler what an owned worker may hold now, and in what time it would serve."""
        self._notices.tell_all(self.places[worker].lend(capacity_bytes, wake_s, self._clock()))

    @contextlib.contextmanager
    def losing(self, workers: Collection[WorkerId], why: str) -> Iterator[None]:
        """Lose these workers, with their machine, as one event: the block tells of the end of each process.

        None is started before `supervisor.bring_back`.
        """
        with self._notices.at_once():
            self.supervisor.send_away(workers)
            yield
            self.supervisor.write_off(workers, why)
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
                self.calls.answered(message)
            case wire.LinkOpened() | MoveMessage():
                self._listener().executor.answered(slot.worker, message, payload)
            case wire.LinkClosed():
                self.lending.link_closed(slot.worker, WorkerId(message.peer))
            case wire.GranulesReturned():
                self.lending.returned(slot.worker, message)
            case wire.RequestTaken():
                self._delivery.taken(message)
            case wire.RequestRejected():
                rejected = slot.worker, message.request, message.cause, message.reason
                log.error("%s rejected request %s, placed there on event #%d: %s", *rejected)
                self._fail(RequestId(message.request), RequestNotTaken(message.request, message.reason))

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """Have a dead worker's requests resume elsewhere from their log; fail those that killed too many workers."""
        worker = slot.worker
        siblings = tuple(self.ready) if self.ready.pop(worker, None) is not None else ()
        self._prefixes.close_worker(worker)
        self.calls.worker_lost(worker)
        theirs = [live for live in self.live.values() if live.worker == worker]
        is_known = ended.expected and all(live.request in self.places[worker].held for live in theirs)
        with self._notices.at_once():
            if is_known:
                self._notices.tell_all(self.places[worker].rest(self._clock()))
            else:
                self._notices.tell_all(self.places[worker].leave(self._clock()))
            if self.reports.worker_lost(worker):
                self._listener().executor.worker_lost(worker)
            if not is_known:
                self._displace(worker, theirs, ended)
        self.lending.worker_ended(worker, siblings)
        # The scheduler no longer knows a worker that was stopped while it had requests, and so cannot have it woken.
        if ended.expected and not is_known and self.supervisor.owner is None:
            self.wake(worker)

    def _displace(self, worker: WorkerId, theirs: Sequence[Live], ended: WorkerEnded) -> None:
        innocent = self._delivery.worker_lost(worker)
        for live in theirs:
            live.lose_worker(not ended.expected and live.request not in innocent, ended.from_outside)
        for live in [live for live in theirs if live.kills_workers]:
            workers = live.deaths + live.harms
            log.error("request %s was running when %d workers died: failing it", live.request, workers)
            self._fail(live.request, RequestKilledWorkers(live.request, workers))

    def worker_steadied(self, slot: Slot) -> None:
        """Tell the scheduler that the worker has run long enough since its last death to count as any other."""
        self._listener().handle(events.WorkerSteadied(self._clock(), worker=slot.worker))

    def _worker_ready(self, slot: Slot, ready: wire.WorkerReady) -> None:
        worker = slot.worker
        self.ready[worker] = ready
        self.reports.worker_ready(worker, ready)
        if ready.caches_prefixes and self._is_prefix_aware:
            self._prefixes.open_worker(worker, ready.block_tokens, ready.total_blocks)
        for request in self.places[worker].take_held():
            if (live := self.reports.owned(request, worker)) is not None:
                self._give(live, worker)
        if self.supervisor.owner is not None:
            self.supervisor.owner.worker_ready(worker, ready)
            self._listener().executor.worker_ready(worker, ready)
            return
        steady = not self.places[worker].setbacks
        offer = Offer(ready.total_blocks * ready.block_bytes, ready.max_requests, ready.block_bytes, steady)
        self._notices.tell_all(self.places[worker].announce(offer, self._clock()))
        self._listener().executor.worker_ready(worker, ready)

    def _step_done(self, worker: WorkerId, done: wire.StepDone, payload: list[bytes]) -> None:
        facts = self.workers[worker]
        if (turn := facts.turn(done.step)) is not Turn.NEXT:
            self._out_of_turn(worker, done.step, turn)
            return
        outputs = self._codec.decode_outputs(payload, facts.index) if payload else None
        reported = self.reports.take(worker, done, outputs, self._clock())
        for request, gap_s in reported.gaps_s.items():
            self._listener().executor.resumed(request, gap_s)
            cause = self.live[request].cause
            self.tell(events.RequestResumed(self._clock(), request=request, pause_s=gap_s, cause=cause))
        for request in reported.acquitted:
            self._delivery.acquit(request)
        for request in reported.finished:
            if (live := self._remove(request)) is not None:
                self._tell_ended(live)
        if outputs is not None:
            self.outputs.put_nowait(outputs)

    def _out_of_turn(self, worker: WorkerId, step: int, turn: Turn) -> None:
        """Drop a repeated report; after a gap kill the worker, so that its requests resume from the log."""
        log.error("%s: report %d is out of order (%s)", worker, step, turn)
        process = self.supervisor.process(worker)
        if turn is Turn.GAP and process is not None:
            process.kill()

    # -- a request's end --------------------------------------------------------------------------------------------

    def _fail(self, request: RequestId, error: MelldError) -> None:
        if (live := self._remove(request)) is not None:
            self.failures.put_nowait((request, error))
            self._tell_ended(live)

    def _remove(self, request: RequestId) -> Live | None:
        live = self.live.pop(request, None)
        if live is not None:
            self._delivery.acquit(request)
            self._prefixes.ended(request, live.worker, live.output_token_ids)
        return live

    def _tell_ended(self, live: Live) -> None:
        self._listener().executor.request_ended(live.request)
        served = len(live.output_token_ids), live.first_token_s
        self.tell(events.RequestFinished(self._clock(), live.request, *served))
