"""The requests of one fleet, from admission to their end: who runs each, and where it goes without its worker.

Owns the unfinished requests.  Decides nothing: facts go out as events, and the driver calls `place` and its like.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from melld.engine.fleet.notices import Notices
from melld.engine.fleet.ports import Codec, FleetListener
from melld.engine.fleet.probation import Probation
from melld.engine.fleet.process import WorkerEnded
from melld.engine.fleet.reports import Reports
from melld.engine.fleet.request import Live, RequestKilledWorkers, new_live, prefix_salt
from melld.engine.fleet.supervisor import Supervisor
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.errors import MelldError
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.kvstore.prefixes import PrefixIndex
from melld.scheduler import events

log = logging.getLogger("melld.fleet")

Failures = asyncio.Queue[tuple[RequestId, MelldError]]
"""Admitted requests that ended with an error, and the error."""


class Requests:
    """All unfinished requests; `live` has them by name.

    `send` writes to a worker's wire; `is_ready` returns True for workers that take requests at once.
    """

    def __init__(
        self,
        live: dict[RequestId, Live],
        supervisor: Supervisor,
        reports: Reports,
        notices: Notices,
        codec: Codec,
        listener: Callable[[], FleetListener],
        clock: Callable[[], float],
        send: Callable[[WorkerId, msgspec.Struct, Sequence[Buffer]], None],
        is_ready: Callable[[WorkerId], bool],
    ) -> None:
        self.live = live
        self.failures: Failures = asyncio.Queue()
        self.probation = Probation()
        self.prefixes = PrefixIndex()
        self._supervisor = supervisor
        self._reports = reports
        self._notices = notices
        self._codec = codec
        self._listener = listener
        self._clock = clock
        self._send = send
        self._is_ready = is_ready

    def admit(self, core_request: Any, client: str = "") -> None:
        """Admit a client's request (vLLM's `EngineCoreRequest`); its tokens come through `outputs`.

        Raises:
            RequestTooLarge, InputTooLarge, QueueFull: it fits no worker or no frame, or the queue is full; nothing is
                kept.
        """
        live = new_live(core_request, self._codec.encode_request, self._clock())
        self.live[live.request] = live
        cached_tokens: Mapping[WorkerId, int] = {}
        if self.prefixes.is_needed:
            tokens, salt = core_request.prompt_token_ids or (), prefix_salt(core_request)
            cached_tokens = self.prefixes.arrived(live.request, tokens, salt)
        self._listener().handle(
            events.RequestArrived(
                self._clock(),
                request=live.request,
                kv_bytes=self._reports.kv_bytes(live.prompt_tokens + (core_request.pooling_params is None)),
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
        ended = [live for name in requests if (live := self._remove(RequestId(name))) is not None]
        by_worker: dict[WorkerId, list[str]] = {}
        for live in ended:
            if live.worker is not None:
                by_worker.setdefault(live.worker, []).append(live.request)
        for worker, names in by_worker.items():
            self._send(worker, wire.AbortRequests(requests=names), ())
        for live in ended:
            self._tell_ended(live)

    def place(self, request: RequestId, worker: WorkerId, cause: EventId = NO_EVENT) -> None:
        """Start the request on the worker, or resume it there from its known tokens."""
        live = self.live[request]
        live.worker, live.cause = worker, cause
        if self._is_ready(worker):
            self.give(live, worker)
            return
        live.taken = False
        self._supervisor.places[worker].held.append(request)
        self._supervisor.wake(worker)

    def hand_over(self, request: RequestId, worker: WorkerId, lease: int, cause: EventId = NO_EVENT) -> None:
        """Make the worker the request's owner under this lease: the commit of a migration."""
        self.live[request].hand_over(worker, lease, cause)
        self.prefixes.placed(request, worker)
        self.acquit(request)

    def suspend(self, request: RequestId) -> None:
        """Drop the request from its worker; it resumes from its known tokens where it is placed next."""
        live = self.live[request]
        worker = live.worker
        if worker is None:
            return
        self._hold_no_more(live)
        self._send(worker, wire.AbortRequests(requests=[request], may_return=True), ())
        live.leave_worker()
        live.suspensions += 1
        self.acquit(request)

    def end(self, request: RequestId, error: MelldError) -> None:
        """End the request with this error: `admit` raises it, or `failures` carries it if the request is admitted."""
        live = self.live.get(request)
        if live is not None and not live.admitted:
            live.refusal = error
        else:
            self.fail(request, error)

    # -- called by the fleet -----------------------------------------------------------------------------------------

    def give_held(self, worker: WorkerId) -> None:
        """Send the requests that were held for this worker, now ready."""
        for request in self._supervisor.places[worker].take_held():
            self.give(self.live[request], worker)

    def give(self, live: Live, worker: WorkerId) -> None:
        """Start or resume the request on the ready worker; a suspect waits for its turn."""
        self.prefixes.placed(live.request, worker)
        if not live.deaths or self.probation.give(live.request, worker):
            self._begin(live, worker)

    def taken(self, taken: wire.RequestTaken) -> None:
        """Note that the worker has received the request."""
        live = self.live.get(RequestId(taken.request))
        if live is not None and live.lease == taken.lease:
            live.taken = True

    def acquit(self, request: RequestId) -> None:
        """Drop the request from its queue of suspects, if it is in one, and resume the next one."""
        following = self.probation.leave(request)
        live = self.live.get(following) if following is not None else None
        if live is not None and live.worker is not None:
            self._begin(live, live.worker)

    def of(self, worker: WorkerId) -> list[Live]:
        """Return the requests that the worker owns."""
        return [live for live in self.live.values() if live.worker == worker]

    def displace(self, worker: WorkerId, ended: WorkerEnded | None = None) -> None:
        """Detach the requests of a worker whose process has ended, or never came; fail those that kill workers."""
        innocent, theirs = self.probation.worker_lost(worker), self.of(worker)
        for live in theirs:
            if ended is None:
                live.leave_worker()
            else:
                live.lose_worker(not ended.expected and live.request not in innocent, ended.from_outside)
        for live in [live for live in theirs if ended is not None and live.kills_workers]:
            workers = live.deaths + live.harms
            log.error("request %s was running when %d workers died: failing it", live.request, workers)
            self.fail(live.request, RequestKilledWorkers(live.request, workers))

    def finish(self, request: RequestId) -> None:
        """Drop the request, whose last output has come."""
        if (live := self._remove(request)) is not None:
            self._tell_ended(live)

    def fail(self, request: RequestId, error: MelldError) -> None:
        """End an admitted request with this error."""
        if (live := self._remove(request)) is not None:
            self.failures.put_nowait((request, error))
            self._tell_ended(live)

    def _begin(self, live: Live, worker: WorkerId) -> None:
        live.taken = live.lease == 0
        if live.is_new:
            add = wire.AddRequest(request=live.request, lease=live.lease, cause=live.cause)
            self._send(worker, add, [live.core_request])
        else:
            resume = wire.ResumeRequest(request=live.request, lease=live.lease, cause=live.cause)
            self._send(worker, resume, [live.core_request, msgspec.msgpack.encode(live.output_token_ids)])

    def _remove(self, request: RequestId) -> Live | None:
        live = self.live.pop(request, None)
        if live is not None:
            self._hold_no_more(live)
            self.acquit(request)
            self.prefixes.ended(request, live.worker, live.output_token_ids)
        return live

    def _hold_no_more(self, live: Live) -> None:
        """Drop the request from its worker's waiting list, if it is there."""
        if live.worker is not None and live.request in (held := self._supervisor.places[live.worker].held):
            held.remove(live.request)

    def _tell_ended(self, live: Live) -> None:
        self._listener().executor.request_ended(live.request)
        served = len(live.output_token_ids), live.first_token_s
        self._notices.tell(events.RequestFinished(self._clock(), live.request, *served))
