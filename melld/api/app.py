"""The HTTP API: one request from its head to its answer.

    route ─► key ─► admission ─► body ─► guards ─► vLLM's serving class ─► one body, or a stream of events

Owns the order of these steps and the one place where errors become answers.  Never talks to a worker.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any

from aiohttp import web
from starlette.datastructures import State
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.utils.gc_utils import freeze_gc_heap

from melld.api.admission import Admission, check_open, shutting_down
from melld.api.answers import JSON, Answer, Dialect
from melld.api.calls import CALLS, Call
from melld.api.connections.connection import ConnectionServer
from melld.api.connections.entrance import Entrance
from melld.api.connections.exchange import Exchange, HttpMetrics
from melld.api.connections.reach import check_sender_of_form, client_of
from melld.api.connections.reader_watch import ReaderWatch
from melld.api.error_mapping import answer_to, needs_traceback
from melld.api.guards.body import FORM, parse_form, read_body
from melld.api.guards.json_text import parse_object
from melld.api.guards.media import broken_media_refused
from melld.api.guards.request import check_request, check_request_id
from melld.api.guards.tiers import priority_of, rights_of
from melld.api.guards.work import check_work
from melld.api.keeping import Keeping
from melld.api.models import AskedModel, asked_model
from melld.api.off_loop import OffLoop
from melld.api.pages import PAGES, WITHOUT_KEY, ApiContext
from melld.api.performing import (
    Result,
    forwarded,
    give_up,
    handler_of,
    is_stream,
    outlet_of,
    perform,
    trust_of,
)
from melld.api.routes import check_method, route_of
from melld.api.serving.fit import fit_classes
from melld.api.stored_responses import ASKED
from melld.api.streams import COMMENT, KeepAlive, until_head
from melld.engine.frontend.caller import Caller, LogprobAccount, called_by, caller
from melld.engine.frontend.moulds import KnownMoulds
from melld.engine.frontend.turns import Turns
from melld.scheduler.priorities import tier_of

log = logging.getLogger("melld.api")

SETTLE_S = 2.0
LOADING_HEAD_AFTER_S = 5.0
"""How long a stream for a model that is being loaded can still be answered with a status."""


@contextlib.asynccontextmanager
async def start_api(
    context: ApiContext, listeners: Iterable[socket.socket]
) -> AsyncIterator[tuple[Admission, Entrance]]:
    """Serve on these bound sockets while the context is open.

    At its end, running calls have `SETTLE_S` to end (the daemon has failed their requests by then); the others are
    aborted, with an answer to their clients.
    """
    api = Api(context)
    server = ConnectionServer(api.handle, context.config())
    runner = web.ServerRunner(server, shutdown_timeout=SETTLE_S)
    await runner.setup()
    # What has been imported and built stays for ever: collecting garbage among it would pause every stream.
    freeze_gc_heap()
    entrance = Entrance(listeners, server)
    try:
        entrance.open()
        with broken_media_refused():
            yield api.admission, entrance
    finally:
        api.admission.begin_drain()
        if not await api.admission.wait_idle(SETTLE_S):
            log.warning("aborting %d calls that did not finish before shutdown", api.admission.abort())
            await api.admission.wait_idle(SETTLE_S)
        entrance.stop()
        await runner.cleanup()
        api.off_loop.close()


def prepare_serving(serving: State) -> None:
    """Fit vLLM's serving classes of a model to this API, once."""
    fit_classes(serving)


class Api:
    """Answers requests.  One per daemon."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._counts = HttpMetrics(context.registry)
        self._logprobs = LogprobAccount()
        self._turns = Turns()
        self._moulds = KnownMoulds()
        self._stored = context.stored
        self.off_loop = OffLoop()
        self.admission = Admission(
            lambda: context.config().max_concurrent_requests,
            context.why_closed,
            lambda: context.keys().count(),
        )
        self._facts = dataclasses.replace(
            context, why_not_ready=lambda: self.admission.why_closed() or context.why_not_ready()
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every error becomes an answer, too."""
        exchange = Exchange(request, self._context.config())
        try:
            response = await self._answer(exchange)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.admission.aborted or request.transport is None or task is None:
                self._counts.disconnects.inc()
                raise
            task.uncancel()
            response = await self._fail(exchange, shutting_down())
        except Exception as error:  # the API's error middleware
            if request.transport is None or request.transport.is_closing():
                self._counts.disconnects.inc()
                if not isinstance(error, ConnectionError):
                    _log_bug(exchange, error, answer_to(error, exchange.parameters))
                raise asyncio.CancelledError from error  # which vLLM's classes turn into an error of their own
            response = await self._fail(exchange, shutting_down() if self.admission.aborted else error)
        exchange.complete(response)
        self._counts.answered(exchange.route, response.status)
        return response

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        if (preflight := exchange.preflight()) is not None:
            return preflight
        exchange.route, rest = route_of(request.path)
        call = CALLS.get(exchange.route)
        exchange.dialect = exchange.dialect if call is None else call.dialect
        check_method(exchange.route, request.method)
        if exchange.route not in WITHOUT_KEY:
            config, keys = self._context.config(), self._context.keys()
            exchange.client = client_of(request.headers, keys, is_open=config.allow_remote_without_key)
        if exchange.route in ASKED:
            asked = ASKED[exchange.route][request.method]
            if request.method == "GET" and request.query.get("stream", "").lower() == "true":
                return await self._follow(exchange, rest)
            return exchange.whole(asked(self._stored, exchange.client.owner, rest), leaves_body=True)
        if call is None:
            return await PAGES[exchange.route](self._facts, rest)
        self.admission.check(exchange.client.name)
        await self._turns.mine()
        config = self._context.config()
        if call.hears:
            check_sender_of_form(request.headers, config)
        body = await read_body(request, call.limits(config), FORM if call.hears else JSON)
        if call.hears:
            fields = await parse_form(request.headers["Content-Type"], body)
        else:
            fields = await self.off_loop.run(len(body), parse_object, body, config.max_json_depth)
        model = asked_model(self._context.models, fields.get("model"))
        # First of all checks: under overload most requests get no further and must cost little.
        least = config.min_priority
        rights = rights_of(exchange.client, 0 if least is None and self._context.keys().count() > 1 else least)
        priority = priority_of(fields if call.engine else {}, rights)
        if call.engine or model.serving is None:
            check_open(model.why_closed())
            model.check_queue(exchange.client.name, priority)
        counted = self._counts.in_flight.track_inprogress()
        with self._called_by(exchange.client.name, priority), counted, model.called():
            check_request_id(request.headers.get("X-Request-Id") or None, "X-Request-Id")
            if model.serving is None:
                is_stream = call.streams and fields.get("stream") is True
                await self._until_loaded(exchange, model, is_stream=is_stream)
            assert model.serving is not None
            return await self._serve(exchange, call, model.serving, fields, len(body))

    async def _follow(self, exchange: Exchange, response_id: str) -> web.StreamResponse:
        """Replay a background response's events from where its client left off, then follow it."""
        after = exchange.request.query.get("starting_after")
        stream = self._stored.follow(exchange.client.owner, response_id, after)
        self.admission.check(exchange.client.name)
        exchange.dialect, exchange.events = Dialect.RESPONSES, int(after or -1) + 1
        with self._called_by(exchange.client.name, 0):
            await exchange.begin()
            return await self._stream(exchange, _ready(Result(stream=stream)))

    async def _until_loaded(self, exchange: Exchange, model: AskedModel, *, is_stream: bool) -> None:
        """Wait for a model that has never been loaded; begin the stream if that takes long."""
        loading = asyncio.ensure_future(model.until_loaded())
        try:
            if is_stream:
                await asyncio.wait({loading}, timeout=LOADING_HEAD_AFTER_S)
            if is_stream and not loading.done():
                response = await exchange.begin()
                await response.write(COMMENT)
                with KeepAlive(exchange, self._context.config().keep_alive_comment_s):
                    await loading
            await loading
        finally:
            loading.cancel()

    @contextlib.contextmanager
    def _called_by(self, client: str, priority: int, *, goes_on: bool = False) -> Iterator[None]:
        """Count a call, or the work in the background with which it `goes_on`."""
        config = self._context.config()
        made = Caller(client, self._logprobs, config.max_prompt_logprobs, config.max_repeated_prompt_tokens, priority)
        with self.admission.call(client, goes_on=goes_on), called_by(made):
            yield

    async def _serve(
        self, exchange: Exchange, call: Call, serving: State, fields: dict[str, Any], size: int
    ) -> web.StreamResponse:
        tier = tier_of(caller().priority)
        exchange.parameters = frozenset(fields)
        handler = handler_of(call, serving)
        await self.off_loop.run(size, check_request, fields, self._context.config(), trust_of(call, serving))
        if exchange.response is None and not exchange.request.headers.get("X-Request-Id"):
            exchange.request_id = fields.get("request_id") or exchange.request_id
        if exchange.dialect is Dialect.RESPONSES:
            fields.setdefault("request_id", f"resp_{exchange.request_id}")
            fields["service_tier"] = tier.value
        vllm_request = forwarded(exchange.request.headers, exchange.request_id)
        parsed = await self.off_loop.run(size, call.parse, fields)
        check_work(parsed, self._context.config())
        keeping = await self._keeping(exchange, parsed, size) if isinstance(parsed, ResponsesRequest) else None
        handler = handler if keeping is None else keeping.serving(handler)
        work = perform(call, handler, parsed, vllm_request, self._turns, tier)
        work = work if keeping is None else keeping.kept(work)
        if is_stream(call, parsed):
            caller().outlet = outlet_of(call, handler, parsed, self._moulds)
            return await self._stream(exchange, work)
        result = await work
        return exchange.whole(result.body, headers=result.headers)

    async def _keeping(self, exchange: Exchange, parsed: ResponsesRequest, size: int) -> Keeping:
        client = exchange.client
        goes_on = functools.partial(self._called_by, client.name, caller().priority, goes_on=True)
        keeping = Keeping(self._stored, client.owner, parsed, size, goes_on, self._turns)
        await keeping.prepare(self._context.config(), self.off_loop)
        return keeping

    async def _stream(self, exchange: Exchange, work: Coroutine[Any, Any, Result]) -> web.StreamResponse:
        config = self._context.config()
        performing = asyncio.create_task(work)
        watch = ReaderWatch(exchange.request, config.slow_reader_s)
        try:
            if exchange.response is None:
                await until_head(performing, caller().admitted)
            with watch:
                response = await exchange.begin()
                with KeepAlive(exchange, config.keep_alive_comment_s), caller().writing_to(exchange):
                    stream = (await performing).stream
                    assert stream is not None, "a streaming call returned a body"
                    async for text in stream:
                        await exchange.write(text)
                await response.write_eof()  # no comment may follow the end, which a slow reader keeps waiting
        finally:
            if watch.ended:
                self._counts.slow_readers.inc()
                log.warning("request %s: client stopped reading, ending it", exchange.request_id)
            await give_up(performing)
        return response

    async def _fail(self, exchange: Exchange, error: BaseException) -> web.StreamResponse:
        """Answer with an error, or end a started stream with it."""
        answer = answer_to(error, exchange.parameters)
        _log_bug(exchange, error, answer)
        if exchange.response is None:
            return exchange.whole(answer.body(exchange.dialect), answer.status, answer.headers, leaves_body=True)
        self._counts.failed_streams.inc()
        log.warning("request %s: stream ended with an error: %s", exchange.request_id, answer.message)
        with ReaderWatch(exchange.request, self._context.config().slow_reader_s):
            await exchange.response.write(answer.event(exchange.dialect, exchange.events))
            await exchange.response.write_eof()
        return exchange.response


def _log_bug(exchange: Exchange, error: BaseException, answer: Answer) -> None:
    if needs_traceback(error, answer):
        log.error("request %s failed", exchange.request_id, exc_info=error)


async def _ready(result: Result) -> Result:
    return result
