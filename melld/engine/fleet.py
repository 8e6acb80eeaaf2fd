"""All workers as one engine: whose request is whose, and the log of every token that a client may have seen.

Owns the requests' placement (their leases), the token log and the KV ledger.  Decides nothing: facts go out as events,
decisions come back as calls of `place` and its like.  Never imports vLLM: what only vLLM can read goes through `Codec`.

    admit ──► RequestArrived ──► driver ──► place ──► AddRequest frame ──► worker
                                                                             │ StepDone frame
    outputs ◄── the owner's, with the lease of now; others are dropped ◄─────┘
"""

import asyncio
import collections
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from melld import events
from melld.engine import wire
from melld.engine.fleet_order import ReportOrder, Turn
from melld.engine.fleet_presence import Offer, Presence
from melld.engine.fleet_probation import PROOF_TOKENS, Probation
from melld.engine.frames import Buffer
from melld.engine.process import WorkerEnded
from melld.engine.supervisor import Slot, Supervisor
from melld.errors import MelldError, RequestTooLarge
from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.kvstore.ledger import Ledger
from melld.migrate.migration_messages import MoveMessage
from melld.migrate.snapshot import RequestSnapshot
from melld.scheduler.pace import Pace

log = logging.getLogger("melld.fleet")
MAX_DEATHS = 2


class RequestKilledWorkers(MelldError):
    """It was on trial when a second worker died: it is not tried on a third."""

    code = "request_kills_workers"
    should_retry = False

    def __init__(self, request: str) -> None:
        super().__init__(f"request {request} was being computed when {MAX_DEATHS} workers died: it is not tried again")


class RequestNotTaken(MelldError):
    """A worker could not take it over."""

    code = "request_not_taken"

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(f"request {request} could not be computed: {reason}")


class Codec(Protocol):
    """vLLM's own encoding, and the few fields of its Structs that the fleet needs."""

    def encode_request(self, core_request: Any) -> Sequence[Buffer]:
        """An `EngineCoreRequest` as buffers."""

    def decode_outputs(self, buffers: Sequence[bytes], engine_index: int) -> Any:
        """An `EngineCoreOutputs` of that worker."""


class MoveKeeper(Protocol):
    """Who runs the migrations, and is told what concerns them."""

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """A worker can be moved to and from."""

    def worker_lost(self, worker: WorkerId) -> None:
        """It is gone.  Said before its requests are given to others."""

    def answered(self, worker: WorkerId, message: Any, payload: list[bytes]) -> None:
        """A worker's answer to a command of a migration, or of a link."""

    def request_ended(self, request: RequestId) -> None:
        """It has ended, or its client has left.  The worker that owns it frees it of its own accord."""

    def went_on(self, request: RequestId, gap_s: float) -> None:
        """The first output since it was handed over, so long after the last one before."""


class Live(msgspec.Struct):
    """A request that has been admitted and has not ended."""

    request: RequestId
    buffers: Sequence[Buffer]
    prompt_tokens: int
    priority: int
    arrived_s: float
    lease: int = 0
    """Outputs with another one are not its."""
    leases: int = 0
    """Leases that have been given out: also those that never became valid are never given again."""
    moves: int = 0
    last_output_s: float = 0.0
    was_handed_over: bool = False
    """Since its last output."""
    worker: WorkerId | None = None
    output_token_ids: list[int] = []
    deaths: int = 0
    """Workers that have died with it, one after the other, since it last made `PROOF_TOKENS` tokens."""
    taken: bool = False
    """Its worker has it: only then its death may be the request's doing."""
    proven_tokens: int = 0
    """With so many output tokens it is acquitted of those deaths."""
    admitted: bool = False
    refusal: MelldError | None = None
    """Why it is not admitted."""


class WorkerFacts(msgspec.Struct):
    """What is known of a ready worker's work."""

    index: int
    geometry: KvGeometry
    max_requests: int
    tokens: int = 0
    reports: ReportOrder = msgspec.field(default_factory=ReportOrder)
    step_s: collections.deque[float] = msgspec.field(default_factory=lambda: collections.deque(maxlen=256))


class Fleet:
    """The workers' requests."""

    def __init__(self, slots: Sequence[Slot], clock: Callable[[], float]) -> None:
        self.supervisor = Supervisor(slots, self)
        self.ledger = Ledger()
        self.live: dict[RequestId, Live] = {}
        self.workers: dict[WorkerId, WorkerFacts] = {}
        self.ready: dict[WorkerId, wire.WorkerReady] = {}
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.on_event: Callable[[events.AnyEvent], None] = lambda _event: None
        self.codec: Codec
        self.moves: MoveKeeper
        self.on_failed: Callable[[RequestId, MelldError], None] = lambda _request, _error: None
        self.dropped_outputs = 0
        self._probation = Probation()
        self._presence = Presence()
        self._geometry: KvGeometry | None = None
        self.itl_target_s: float | None = None
        self._paces: dict[WorkerId, Pace] = {}
        self._indices = {slot.worker: index for index, slot in enumerate(slots)}
        self._clock = clock
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0

    # -- from above: the front end ----------------------------------------------------------------------------------

    def admit(self, core_request: Any, client: str = "") -> None:
        """Take a request (vLLM's `EngineCoreRequest`) of that client; its tokens come through `outputs`.

        Raises:
            RequestTooLarge, QueueFull: it fits no worker, or too many wait; nothing has been kept.
        """
        request = RequestId(core_request.request_id)
        prompt_tokens = len(core_request.prompt_token_ids or core_request.prompt_embeds or ())
        live = Live(
            request=request,
            buffers=self.codec.encode_request(core_request),
            prompt_tokens=prompt_tokens,
            priority=core_request.priority,
            arrived_s=self._clock(),
        )
        self.live[request] = live
        self._tell(
            events.RequestArrived(
                self._clock(),
                request=request,
                kv_bytes=self._kv_bytes(prompt_tokens + 1),
                prompt_tokens=prompt_tokens,
                priority=core_request.priority,
                client=client,
            )
        )
        if live.refusal is not None:
            del self.live[request]
            raise live.refusal
        live.admitted = True

    def abort(self, requests: Iterable[str]) -> None:
        """Forget these requests and free their blocks wherever they are; unknown ones are ignored."""
        by_worker: dict[WorkerId, list[str]] = {}
        ended = []
        for name in requests:
            live = self.live.pop(RequestId(name), None)
            if live is None:
                continue
            ended.append(live.request)
            self._acquit(live.request)
            if live.worker is not None:
                by_worker.setdefault(live.worker, []).append(name)
        for worker, names in by_worker.items():
            self.send(worker, wire.AbortRequests(requests=names))
        for request in ended:
            self.moves.request_ended(request)
            self._tell(events.RequestFinished(self._clock(), request=request))

    async def call_all(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """One of `wire.UTILITIES` on every ready worker.

        Raises:
            RuntimeError: a worker's call failed, or it died before it answered.
        """
        if method not in wire.UTILITIES:
            raise ValueError(f"{method} is not among the calls that a worker takes")
        futures = []
        for worker in filter(self.is_ready, self.workers):
            self._next_call += 1
            future = self._calls[self._next_call] = asyncio.get_running_loop().create_future()
            self.send(worker, wire.CallUtility(call=self._next_call, method=method, arguments=list(arguments)))
            futures.append(future)
        return list(await asyncio.gather(*futures))

    async def ask(self, worker: WorkerId, make: Callable[[int], msgspec.Struct], deadline_s: float) -> Any:
        """The result of one call of one worker; `make` makes the message from the call's number.

        Raises:
            RuntimeError: it failed, with the worker's words.
            TimeoutError: the worker did not answer, or is no more.
        """
        self._next_call += 1
        call, future = self._next_call, asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self.send(worker, make(call))
        try:
            return await asyncio.wait_for(future, deadline_s)
        finally:
            self._calls.pop(call, None)

    # -- from beside: the commands of the driver and of migrations --------------------------------------------------

    def send(self, worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write to a worker's wire; dropped when it is not ready."""
        process = self.supervisor.process(worker)
        if process is not None:
            process.send(message, payload)

    def new_lease(self, request: RequestId) -> int:
        """A lease that nobody has had.  It is valid once the request is placed, or handed over, with it."""
        live = self.live[request]
        live.leases += 1
        return live.leases

    def reserve(self, request: RequestId, worker: WorkerId, tokens: int) -> None:
        """Room for so many tokens of it is kept there, until `ledger.release`."""
        if (facts := self.workers.get(worker)) is not None:
            self.ledger.reserve(worker, request, facts.geometry.blocks_for_tokens(tokens))

    def hand_over(self, request: RequestId, worker: WorkerId, lease: int) -> None:
        """The request is that worker's from now on, under this lease: the commit of a migration."""
        live = self.live[request]
        live.worker, live.lease = worker, lease
        live.moves += 1
        live.taken = live.was_handed_over = True
        self._acquit(request)

    def place(self, request: RequestId, worker: WorkerId) -> None:
        """Give the request to the worker: from its beginning, or from the tokens that are known of it."""
        live = self.live[request]
        live.worker = worker
        if self.is_ready(worker):
            self._give(live, worker)
            return
        live.taken = False
        self._presence.hold(request, worker)
        self.supervisor.wake(worker)

    def is_ready(self, worker: WorkerId) -> bool:
        """Whether it takes requests at once; those placed on one that does not are held until it is ready."""
        return worker in self.workers and self.supervisor.process(worker) is not None

    def stop_worker(self, worker: WorkerId) -> None:
        """End the process of a worker that runs nothing.  The scheduler goes on to know it, and may have it woken.

        For one that still has requests: they go on elsewhere from their tokens when it is gone.
        """
        self.supervisor.stop_worker(worker)
        self._tell_all(self._presence.stopped(worker, self.supervisor.places[worker].wake_s, self._clock()))

    def start_worker(self, worker: WorkerId) -> None:
        """Start it again; nothing where it has a process."""
        self.supervisor.start_worker(worker)

    def _keep_pace(self, worker: WorkerId, step_s: float, running: int) -> None:
        """With a target for the steps' time: have the scheduler give a slow worker fewer requests at once."""
        if self.itl_target_s is None or not step_s:
            return
        pace = self._paces.get(worker)
        if pace is None:
            pace = self._paces[worker] = Pace(self.itl_target_s, self.workers[worker].max_requests)
        slots = pace.stepped(step_s, running)
        self._tell_all(self._presence.limit(worker, slots, self._clock()))

    def _give(self, live: Live, worker: WorkerId) -> None:
        if not live.deaths or self._probation.give(live.request, worker):
            self._begin(live, worker)

    def _begin(self, live: Live, worker: WorkerId) -> None:
        request = live.request
        live.taken = live.lease == 0
        if live.lease == 0 and not live.output_token_ids:
            self.send(worker, wire.AddRequest(request=request, lease=live.lease), live.buffers)
            return
        snapshot = RequestSnapshot.from_log(
            request, bytes(live.buffers[0]), live.prompt_tokens, list(live.output_token_ids)
        )
        self.send(worker, wire.ResumeRequest(request=request, lease=live.lease), [snapshot.encode()])

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
        grown = {}
        for (request, worker), kv_bytes in self.ledger.take_grown().items():
            live = self.live.get(request)
            if live is not None and live.worker == worker:
                grown[request] = kv_bytes
        return grown

    def take_preempted(self) -> list[RequestId]:
        """The placed requests that vLLM has pushed out of a worker's blocks since the last call."""
        return [
            request
            for request, worker in self.ledger.take_emptied()
            if (live := self.live.get(request)) is not None and live.worker == worker
        ]

    def withdraw(self, worker: WorkerId) -> None:
        """Take a worker that is not ready from the scheduler: those that wait for it to wake are placed anew."""
        self.moves.worker_lost(worker)
        for live in self.live.values():
            if live.worker == worker:
                live.worker = None
                live.lease = self.new_lease(live.request)
        self._tell_all(self._presence.lost(worker, self._clock()))

    def limit_capacity(self, worker: WorkerId, capacity_bytes: int) -> None:
        """Have the scheduler reckon with so much on the worker, until it is told another number."""
        self._tell_all(self._presence.resize(worker, capacity_bytes, self._clock()))

    # -- from below: the supervisor's listener ----------------------------------------------------------------------

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """A frame of a worker."""
        match message:
            case wire.StepDone():
                self._step_done(slot.worker, message, payload)
            case wire.WorkerReady():
                self._worker_ready(slot, message)
            case wire.UtilityDone():
                self._utility_done(message)
            case wire.LinkOpened() | MoveMessage():
                self.moves.answered(slot.worker, message, payload)
            case wire.RequestTaken():
                self._request_taken(message)
            case wire.RequestRejected():
                log.error("%s rejected request %s: %s", slot.worker, message.request, message.reason)
                self._fail(RequestId(message.request), RequestNotTaken(message.request, message.reason))

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """A worker is gone: its requests go on elsewhere from their log, but for those that killed too many."""
        worker = slot.worker
        self.ready.pop(worker, None)
        self._paces.pop(worker, None)
        if self.workers.pop(worker, None) is not None:
            self.ledger.close_worker(worker)
            self.moves.worker_lost(worker)
        theirs = [live for live in self.live.values() if live.worker == worker]
        if ended.expected and all(self._presence.holds(live.request, worker) for live in theirs):
            self._tell_all(self._presence.stopped(worker, self.supervisor.places[worker].wake_s, self._clock()))
            return
        innocent = self._probation.worker_lost(worker)
        poison = []
        for live in theirs:
            live.worker = None
            live.lease = self.new_lease(live.request)
            live.deaths += not ended.expected and live.taken and live.request not in innocent
            live.proven_tokens = len(live.output_token_ids) + PROOF_TOKENS
            if live.deaths >= MAX_DEATHS:
                poison.append(live.request)
        for request in poison:
            log.error("request %s was there when %d workers died: not tried again", request, MAX_DEATHS)
            self._fail(request, RequestKilledWorkers(request))
        self._tell_all(self._presence.lost(worker, self._clock()))

    def _worker_ready(self, slot: Slot, ready: wire.WorkerReady) -> None:
        worker = slot.worker
        geometry = self._geometry = KvGeometry(block_tokens=ready.block_tokens, block_bytes=ready.block_bytes)
        self.ready[worker] = ready
        self.workers[worker] = WorkerFacts(self._indices[worker], geometry, ready.max_requests)
        self.ledger.open_worker(worker, geometry, ready.total_blocks)
        for request in self._presence.release(worker):
            live = self.live.get(request)
            if live is not None and live.worker == worker:
                self._give(live, worker)
        offer = Offer(ready.total_blocks * ready.block_bytes, ready.max_requests)
        self._tell_all(self._presence.ready(worker, offer, self._clock()))
        self.moves.worker_ready(worker, ready)

    def _step_done(self, worker: WorkerId, done: wire.StepDone, payload: list[bytes]) -> None:
        facts = self.workers[worker]
        if (turn := facts.reports.turn(done.step)) is not Turn.NEXT:
            self._out_of_turn(worker, done.step, turn)
            return
        if done.step_s:
            facts.step_s.append(done.step_s)
        blocks = (done.used_blocks, done.total_blocks)
        self.ledger.blocks_changed(worker, done.step, blocks, done.blocks, done.gone)  # type: ignore[arg-type]
        if payload:
            outputs = self.codec.decode_outputs(payload, facts.index)
            self._keep_pace(worker, done.step_s, len(outputs.outputs))
            self._take_outputs(worker, done, outputs)
            self.outputs.put_nowait(outputs)

    def _out_of_turn(self, worker: WorkerId, step: int, turn: Turn) -> None:
        """A report that came twice says nothing; after one that is missing, its requests go on from the log."""
        log.error("%s: report %d is not the next one (%s)", worker, step, turn)
        process = self.supervisor.process(worker)
        if turn is Turn.GAP and process is not None:
            process.kill()

    def _take_outputs(self, worker: WorkerId, done: wire.StepDone, outputs: Any) -> None:
        """Log the owner's tokens; take out of `outputs` what comes from anybody else."""
        now_s = self._clock()
        kept = []
        new_tokens: dict[RequestId, int] = {}
        finished = []
        for output in outputs.outputs:
            live = self.live.get(output.request_id)
            if live is None or live.worker != worker or live.lease != done.leases.get(output.request_id, 0):
                self.dropped_outputs += 1
                continue
            kept.append(output)
            if live.was_handed_over:
                live.was_handed_over = False
                self.moves.went_on(live.request, now_s - live.last_output_s)
            live.last_output_s = now_s
            if output.new_token_ids:
                live.output_token_ids.extend(output.new_token_ids)
                if live.deaths and len(live.output_token_ids) >= live.proven_tokens:
                    live.deaths = 0
                    self._acquit(live.request)
                new_tokens[live.request] = len(output.new_token_ids)
            if output.finish_reason is not None:
                finished.append(live.request)
        outputs.outputs = kept
        self.workers[worker].tokens += sum(new_tokens.values())
        self.ledger.tokens_seen(worker, done.step, new_tokens)
        for request in finished:
            del self.live[request]
            self._acquit(request)
            self.moves.request_ended(request)
            self._tell(events.RequestFinished(self._clock(), request=request))

    def _request_taken(self, taken: wire.RequestTaken) -> None:
        live = self.live.get(RequestId(taken.request))
        if live is not None and live.lease == taken.lease:
            live.taken = True

    def _acquit(self, request: RequestId) -> None:
        """Let the next suspect of its worker go on."""
        following = self._probation.leave(request)
        live = self.live.get(following) if following is not None else None
        if live is not None and live.worker is not None:
            self._begin(live, live.worker)

    def _fail(self, request: RequestId, error: MelldError) -> None:
        live = self.live.pop(request, None)
        if live is not None:
            self._acquit(request)
            self.on_failed(request, error)
            self.moves.request_ended(request)
            self._tell(events.RequestFinished(self._clock(), request=request))

    def _utility_done(self, done: wire.UtilityDone) -> None:
        future = self._calls.pop(done.call, None)
        if future is not None and not future.done():
            if done.error is not None:
                future.set_exception(RuntimeError(done.error))
            else:
                future.set_result(done.result)

    def _kv_bytes(self, tokens: int) -> int:
        """By the geometry of the latest worker: they all run the same model."""
        return self._geometry.bytes_for_tokens(tokens) if self._geometry is not None else 0

    def _tell_all(self, found: Iterable[events.AnyEvent]) -> None:
        for event in found:
            self._tell(event)

    def _tell(self, event: events.AnyEvent) -> None:
        self.on_event(event)
