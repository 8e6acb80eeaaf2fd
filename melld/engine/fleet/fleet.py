"""All workers as one engine: requests come in, workers compute them, tokens go out, whoever dies meanwhile.

Owns the requests that live, and joins the parts that have the rest.  Decides nothing: facts go out as events, decisions
come back as calls of `place` and its like.  Never imports vLLM: what only vLLM can read goes through `Codec`.

    admit ──► RequestArrived ──► driver ──► place ──► Dispatch ──AddRequest──► worker
                                                                                 │
    outputs ◄── the owner's, with the lease of now ◄── Reports ◄────StepDone─────┘
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from melld.config import HealthConfig
from melld.engine.fleet.calls import Calls
from melld.engine.fleet.dispatch import Dispatch
from melld.engine.fleet.place import Offer, Place, Slot
from melld.engine.fleet.ports import Codec, FleetListener
from melld.engine.fleet.process import WorkerEnded
from melld.engine.fleet.reports import Reports, Turn
from melld.engine.fleet.request import Live, RequestKilledWorkers, RequestNotTaken
from melld.engine.fleet.supervisor import Supervisor
from melld.engine.fleet.template import Template
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import MAX_FRAME_BYTES, Buffer
from melld.errors import InputTooLarge, MelldError, RequestTooLarge, UnknownWorker
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.kvstore.ledger import Ledger
from melld.migrate.messages import MoveMessage
from melld.scheduler import events

log = logging.getLogger("melld.fleet")

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 2
"""Encoded, with its images: the tokens that it makes come beside it in a frame when it goes on elsewhere."""

Failures = asyncio.Queue[tuple[RequestId, MelldError]]
"""Admitted requests that ended with an error, and which."""


class Fleet:
    """The workers' requests.

    What happens is told to `listener()` at once, before anybody else acts on it.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        template: Template,
        codec: Codec,
        listener: Callable[[], FleetListener],
        clock: Callable[[], float],
        health: HealthConfig | None = None,
        itl_target_s: float | None = None,
    ) -> None:
        self.supervisor = Supervisor(slots, template, self, health or HealthConfig())
        self.places: Mapping[WorkerId, Place] = self.supervisor.places
        self.start_worker = self.supervisor.start_worker
        self.sleep = self.supervisor.sleep
        self.wake = self.supervisor.wake
        self.ledger = Ledger()
        self.live: dict[RequestId, Live] = {}
        self.ready: dict[WorkerId, wire.WorkerReady] = {}
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.failures: Failures = asyncio.Queue()
        self.reports = Reports((slot.worker for slot in slots), self.live, self.ledger, self._limit_slots, itl_target_s)
        self.calls = Calls(self.send)
        self._dispatch = Dispatch(self.live, self.send)
        self._untold: list[events.AnyEvent] | None = None
        self.workers = self.reports.workers
        self._codec = codec
        self._listener = listener
        self._clock = clock

    # -- from above: the front end ----------------------------------------------------------------------------------

    def admit(self, core_request: Any, client: str = "") -> None:
        """Take a request (vLLM's `EngineCoreRequest`) of that client; its tokens come through `outputs`.

        Raises:
            RequestTooLarge, InputTooLarge, QueueFull: it fits no worker or no frame, or too many wait; nothing is kept.
        """
        request = RequestId(core_request.request_id)
        prompt = core_request.prompt_embeds if core_request.prompt_token_ids is None else core_request.prompt_token_ids
        prompt_tokens = 0 if prompt is None else len(prompt)
        live = Live(
            request=request,
            core_request=self._encode(core_request),
            prompt_tokens=prompt_tokens,
            priority=core_request.priority,
            arrived_s=self._clock(),
        )
        self.live[request] = live
        self._listener().handle(
            events.RequestArrived(
                self._clock(),
                request=request,
                kv_bytes=self.reports.kv_bytes(prompt_tokens + 1),
                prompt_tokens=prompt_tokens,
                priority=core_request.priority,
                client=client,
            )
        )
        if live.refusal is not None:
            del self.live[request]
            raise live.refusal
        live.admitted = True

    def _encode(self, core_request: Any) -> bytes:
        encoded = self._codec.encode_request(core_request)
        if len(encoded) > MAX_REQUEST_BYTES:
            raise InputTooLarge(core_request.request_id, len(encoded), MAX_REQUEST_BYTES)
        return encoded

    def abort(self, requests: Iterable[str]) -> None:
        """Forget these requests and free their blocks wherever they are; unknown ones are ignored."""
        by_worker: dict[WorkerId, list[str]] = {}
        ended = []
        for name in requests:
            live = self._remove(RequestId(name))
            if live is None:
                continue
            ended.append(live.request)
            if live.worker is not None:
                by_worker.setdefault(live.worker, []).append(name)
        for worker, names in by_worker.items():
            self.send(worker, wire.AbortRequests(requests=names))
        for request in ended:
            self._tell_ended(request)

    async def call_all(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """One of `wire.UTILITIES` on every ready worker.

        Raises:
            RuntimeError: a worker's call failed, or the worker ended first.
        """
        return await self.calls.ask_all(filter(self.is_ready, self.workers), method, arguments)

    # -- from beside: the commands of the driver and of migrations --------------------------------------------------

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write to a worker's wire; dropped when it is not ready."""
        process = self.supervisor.process(worker)
        if process is not None:
            process.send(message, payload)

    def tell(self, event: events.AnyEvent) -> None:
        """Let the scheduler hear of it, once the fleet's own records are in order."""
        if self._untold is None:
            self._listener().handle(event)
        else:
            self._untold.append(event)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """What is told in here is heard afterwards, in its order: nobody decides on half of it."""
        untold: list[events.AnyEvent] = []
        self._untold = untold
        try:
            yield
        finally:
            self._untold = None
            self._tell_all(untold)

    def new_lease(self, request: RequestId) -> int:
        """A lease that nobody has had.  It is valid once the request is placed, or handed over, with it."""
        return self.live[request].new_lease()

    def reserve(self, request: RequestId, worker: WorkerId, tokens: int) -> None:
        """Room for so many tokens of it is kept there, until `ledger.release`."""
        if (facts := self.workers.get(worker)) is not None:
            self.ledger.reserve(worker, request, facts.geometry.blocks_for_tokens(tokens))

    def hand_over(self, request: RequestId, worker: WorkerId, lease: int, cause: EventId = NO_EVENT) -> None:
        """Make the request that worker's from now on, under this lease: the commit of a migration."""
        self.live[request].hand_over(worker, lease, cause)
        self._dispatch.acquit(request)

    def place(self, request: RequestId, worker: WorkerId, cause: EventId = NO_EVENT) -> None:
        """Give the request to the worker: from its beginning, or from the tokens that are known of it."""
        live = self.live[request]
        live.worker, live.cause = worker, cause
        if self.is_ready(worker):
            self._dispatch.give(live, worker)
            return
        live.taken = False
        self.places[worker].held.append(request)
        self.wake(worker)

    def is_ready(self, worker: WorkerId) -> bool:
        """Whether it takes requests at once; those placed on one that does not are held until it is ready."""
        return worker in self.workers and self.supervisor.process(worker) is not None

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End the process of a worker that runs nothing.  The scheduler goes on to know it, and may have it woken.

        For one that still has requests: they go on elsewhere from their tokens when it is gone, and it is started
        again unless it is to stay out of service.
        """
        self.supervisor.stop_worker(worker, stay_out=stay_out)
        self._tell_all(self.places[worker].rest(self._clock()))

    def place_of(self, worker: WorkerId) -> Place:
        """Return the worker's place.

        Raises:
            UnknownWorker: no worker has that name.
        """
        if worker not in self.places:
            raise UnknownWorker(worker, list(self.places))
        return self.places[worker]

    def _limit_slots(self, worker: WorkerId, slots: int) -> None:
        """Have the scheduler give a slow worker fewer requests at once."""
        self._tell_all(self.places[worker].limit(slots, self._clock()))

    def refuse(self, request: RequestId, kv_bytes: int, capacity_bytes: int) -> None:
        """The request fits nowhere."""
        self.end(request, RequestTooLarge(request, kv_bytes, capacity_bytes))

    def end(self, request: RequestId, error: MelldError) -> None:
        """It ends with this error: `admit` raises it, or, had it been admitted, whoever reads its outputs."""
        live = self.live.get(request)
        if live is not None and not live.admitted:
            live.refusal = error
        else:
            self._fail(request, error)

    def take_grown(self) -> dict[RequestId, int]:
        """The sizes of placed requests that have grown since the last call."""
        return {
            request: kv_bytes
            for (request, worker), kv_bytes in self.ledger.take_grown().items()
            if self._owned(request, worker) is not None
        }

    def shared_bytes(self, worker: WorkerId) -> int:
        """By how much the worker uses less than the sizes of its requests come to."""
        return self.ledger.shared_bytes(worker, lambda request: self._owned(request, worker) is not None)

    def take_preempted(self) -> list[RequestId]:
        """The placed requests that vLLM has pushed out of a worker's blocks since the last call."""
        emptied = self.ledger.take_emptied()
        return [request for request, worker in emptied if self._owned(request, worker) is not None]

    def withdraw(self, worker: WorkerId) -> None:
        """Take a worker that is not ready from the scheduler: those that wait for it to wake are placed anew."""
        with self._at_once():
            self._tell_all(self.places[worker].leave(self._clock()))
            self._listener().executor.worker_lost(worker)
            self._dispatch.worker_lost(worker)
            for live in self.live.values():
                if live.worker == worker:
                    live.leave_worker()

    def limit_capacity(self, worker: WorkerId, capacity_bytes: int) -> None:
        """Have the scheduler reckon with so much on the worker, until it is told another number."""
        self._tell_all(self.places[worker].resize(capacity_bytes, self._clock()))

    # -- from below: the supervisor's listener ----------------------------------------------------------------------

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """A frame of a worker."""
        match message:
            case wire.StepDone():
                self._step_done(slot.worker, message, payload)
            case wire.WorkerReady():
                self._worker_ready(slot, message)
            case wire.UtilityDone():
                self.calls.answered(message)
            case wire.LinkOpened() | MoveMessage():
                self._listener().executor.answered(slot.worker, message, payload)
            case wire.RequestTaken():
                self._dispatch.taken(message)
            case wire.RequestRejected():
                rejected = slot.worker, message.request, message.cause, message.reason
                log.error("%s rejected request %s, placed there on event #%d: %s", *rejected)
                self._fail(RequestId(message.request), RequestNotTaken(message.request, message.reason))

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """A worker is gone: its requests go on elsewhere from their log, but for those that killed too many."""
        worker = slot.worker
        self.ready.pop(worker, None)
        self.calls.worker_lost(worker)
        theirs = [live for live in self.live.values() if live.worker == worker]
        is_known = ended.expected and all(live.request in self.places[worker].held for live in theirs)
        with self._at_once():
            if is_known:
                self._tell_all(self.places[worker].rest(self._clock()))
            else:
                self._tell_all(self.places[worker].leave(self._clock()))
            if self.reports.worker_lost(worker):
                self._listener().executor.worker_lost(worker)
            if not is_known:
                self._displace(worker, theirs, ended)
        if ended.expected and not is_known:  # the scheduler does not know it any more, and so cannot have it woken
            self.wake(worker)

    def _displace(self, worker: WorkerId, theirs: Sequence[Live], ended: WorkerEnded) -> None:
        innocent = self._dispatch.worker_lost(worker)
        for live in theirs:
            live.lose_worker(not ended.expected and live.request not in innocent, ended.from_outside)
        for live in [live for live in theirs if live.kills_workers]:
            workers = live.deaths + live.harms
            log.error("request %s was there when %d workers died: not tried again", live.request, workers)
            self._fail(live.request, RequestKilledWorkers(live.request, workers))

    def worker_steadied(self, slot: Slot) -> None:
        """A worker that had died has worked for long enough to be used like any other."""
        self._listener().handle(events.WorkerSteadied(self._clock(), worker=slot.worker))

    def _worker_ready(self, slot: Slot, ready: wire.WorkerReady) -> None:
        worker = slot.worker
        self.ready[worker] = ready
        self.reports.worker_ready(worker, ready)
        for request in self.places[worker].take_held():
            if (live := self._owned(request, worker)) is not None:
                self._dispatch.give(live, worker)
        steady = not self.places[worker].setbacks
        offer = Offer(ready.total_blocks * ready.block_bytes, ready.max_requests, ready.block_bytes, steady)
        self._tell_all(self.places[worker].announce(offer, self._clock()))
        self._listener().executor.worker_ready(worker, ready)

    def _step_done(self, worker: WorkerId, done: wire.StepDone, payload: list[bytes]) -> None:
        facts = self.workers[worker]
        if (turn := facts.turn(done.step)) is not Turn.NEXT:
            self._out_of_turn(worker, done.step, turn)
            return
        outputs = self._codec.decode_outputs(payload, facts.index) if payload else None
        reported = self.reports.take(worker, done, outputs, self._clock())
        for request, gap_s in reported.gaps_s.items():
            self._listener().executor.went_on(request, gap_s)
            cause = self.live[request].cause
            self.tell(events.RequestResumed(self._clock(), request=request, pause_s=gap_s, cause=cause))
        for request in reported.acquitted:
            self._dispatch.acquit(request)
        for request in reported.finished:
            if self._remove(request) is not None:
                self._tell_ended(request)
        if outputs is not None:
            self.outputs.put_nowait(outputs)

    def _out_of_turn(self, worker: WorkerId, step: int, turn: Turn) -> None:
        """Drop a report that came twice; kill the worker after a gap: its requests go on from the log."""
        log.error("%s: report %d is not the next one (%s)", worker, step, turn)
        process = self.supervisor.process(worker)
        if turn is Turn.GAP and process is not None:
            process.kill()

    # -- a request's end --------------------------------------------------------------------------------------------

    def _fail(self, request: RequestId, error: MelldError) -> None:
        if self._remove(request) is not None:
            self.failures.put_nowait((request, error))
            self._tell_ended(request)

    def _remove(self, request: RequestId) -> Live | None:
        live = self.live.pop(request, None)
        if live is not None:
            self._dispatch.acquit(request)
        return live

    def _tell_ended(self, request: RequestId) -> None:
        self._listener().executor.request_ended(request)
        self.tell(events.RequestFinished(self._clock(), request=request))

    def _owned(self, request: RequestId, worker: WorkerId) -> Live | None:
        """The request if it is that worker's now."""
        live = self.live.get(request)
        return live if live is not None and live.worker == worker else None

    def _tell_all(self, found: Iterable[events.AnyEvent]) -> None:
        for event in found:
            self.tell(event)
