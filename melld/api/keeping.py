"""Keeps the answers of vLLM's serving class for `/v1/responses` in `StoredResponses`, in place of its own stores.

Owns the seam: vLLM's class keeps responses, prompts and tasks in dictionaries that never shrink and know no keys.  Here
it finds in them what belongs to the present call, and has its answers in the background made by `Keeping`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import msgspec
from starlette.datastructures import State
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from melld.api.answers import Refusal, bad
from melld.api.calls import CALLS
from melld.api.error_mapping import ServingFault, answer_to, needs_traceback
from melld.api.long_answers import LongAnswer
from melld.api.off_loop import OffLoop
from melld.api.performing import Result
from melld.api.stored_responses import Stored, StoredResponses
from melld.api.streams import event_text
from melld.config_server import ServerConfig

log = logging.getLogger("melld.api")

_DUMP = CALLS["/v1/responses"].dump
_COMPLETED = "event: response.completed\ndata: "


class _Completed(msgspec.Struct):
    """The last event of a stream."""

    response: msgspec.Raw


class Keeping:
    """The fate of one call's answer."""

    def __init__(
        self,
        store: StoredResponses,
        owner: bytes,
        request: ResponsesRequest,
        size: int,
        goes_on: Callable[[], AbstractContextManager[None]],
        long: LongAnswer,
    ) -> None:
        """Take the call with the size of its body, and a context in which the call `goes_on` in the background."""
        self._store = store
        self._owner = owner
        self._request = request
        self._size = size
        self._goes_on = goes_on
        self.long = long
        self.previous: ResponsesResponse | None = None
        self.prompts: dict[str, list[Any]] = {}
        """By id, in vLLM's form: that of the previous answer, and this call's if it is to be stored."""
        self._stored: Stored | None = None

    async def prepare(self, limits: ServerConfig, off_loop: OffLoop) -> None:
        """Find the answer that this one goes on from.

        Raises:
            Refusal: 404, there is none; 409, this one or that one is still being made; 400.
        """
        request = self._request
        if request.background and not limits.max_stored_responses:
            raise bad("background", "this server stores no responses")
        self._store.check_new(self._owner, request.request_id)
        if (wanted := request.previous_response_id) is None:
            return
        found = self._store.find(self._owner, wanted, "previous_response_id")
        if not found.is_done:
            message = f"the response {wanted} is still being made"
            raise Refusal(409, message, code="response_in_progress", param="previous_response_id")
        if len(found.messages) > limits.max_message_parts:
            message = f"a conversation has at most {limits.max_message_parts} messages"
            raise bad("previous_response_id", message)
        self._size += found.size
        self.prompts[wanted] = found.messages
        previous = await off_loop.run(len(found.body), ResponsesResponse.model_validate_json, found.body)
        if previous.status in ("failed", "cancelled"):
            raise bad("previous_response_id", f"the response {wanted} is {previous.status}")
        self.previous = previous

    async def kept(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, and keep it."""
        token = _KEEPING.set(self)
        try:
            result = await work
        finally:
            _KEEPING.reset(token)
        if self._request.background:
            return result
        if result.stream is not None:
            return Result(stream=self._watched(result.stream))
        self._keep(result.body)
        return result

    async def _watched(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            async for text in stream:
                if text.startswith(_COMPLETED):
                    last = msgspec.json.decode(text.removeprefix(_COMPLETED), type=_Completed)
                    self._keep(bytes(last.response))
                yield text
        finally:
            await stream.aclose()

    def _keep(self, body: bytes) -> None:
        """Keep an answer if it is to be stored."""
        response_id = self._request.request_id
        if (messages := self.prompts.get(response_id)) is not None:
            size = self._size + len(body)
            self._store.put(self._owner, response_id, Stored(body=body, messages=messages, size=size))

    def queue(self, response: ResponsesResponse) -> None:
        """Keep the place of an answer that is to be made in the background."""
        body, messages = response.model_dump_json(**_DUMP).encode(), self.prompts[response.id]
        self._stored = Stored(body=body, messages=messages, size=self._size, background=True, is_done=False)
        self._stored.events = [] if self._request.stream else None
        self._store.put(self._owner, response.id, self._stored)

    async def make(self, serve: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Make the answer in the background."""
        with self._working() as stored:
            made = await serve()
            if isinstance(made, ErrorResponse):
                raise ServingFault(made)
            self._finish(stored, await self.long.encode(made, _DUMP))

    async def make_stream(self, events: AsyncGenerator[Any, None]) -> None:
        """Make the answer in the background, event by event."""
        with self._working() as stored:
            async with contextlib.aclosing(events):
                async for event in events:
                    response = getattr(event, "response", None)
                    body = None if response is None else response.model_dump_json(**_DUMP).encode()
                    stored.add(event_text(event), body)
            self._finish(stored, stored.body)

    def _finish(self, stored: Stored, body: bytes) -> None:
        """Keep what has been made, unless the answer has been cancelled or deleted meanwhile."""
        if not stored.is_done:
            stored.size += len(body)
            stored.done(body)
            self._store.put(self._owner, self._request.request_id, stored)

    def follow(self) -> AsyncGenerator[str, None]:
        """Return the stream of the answer that is made in the background."""
        assert self._stored is not None
        return self._stored.follow()

    @contextlib.contextmanager
    def _working(self) -> Iterator[Stored]:
        """Work for the answer in this task; keep what it fails with."""
        stored = self._stored
        assert stored is not None
        stored.work = asyncio.current_task()
        try:
            with self._goes_on():
                yield stored
        except Exception as error:
            answer = answer_to(error, frozenset(self._request.model_fields_set))
            if needs_traceback(error, answer):
                log.error("request %s failed", self._request.request_id, exc_info=error)
            stored.fail(answer)
        finally:
            stored.work = None


_KEEPING: ContextVar[Keeping | None] = ContextVar("melld_keeping", default=None)


class _Answers:
    """Stands in for vLLM's store of responses."""

    def get(self, response_id: str) -> ResponsesResponse | None:
        keeping = _KEEPING.get()
        previous = None if keeping is None else keeping.previous
        return previous if previous is not None and previous.id == response_id else None

    def __setitem__(self, _response_id: str, response: ResponsesResponse) -> None:
        if (keeping := _KEEPING.get()) is not None and response.status == "queued":
            keeping.queue(response)


class _Prompts:
    """Stands in for vLLM's store of prompts."""

    def get(self, response_id: str) -> list[Any] | None:
        keeping = _KEEPING.get()
        return None if keeping is None else keeping.prompts.get(response_id)

    def __getitem__(self, response_id: str) -> list[Any]:
        messages = self.get(response_id)
        assert messages is not None
        return messages

    def __setitem__(self, response_id: str, messages: list[Any]) -> None:
        if (keeping := _KEEPING.get()) is not None:
            keeping.prompts[response_id] = messages


def store_responses(serving: State) -> None:
    """Give vLLM's serving class these stores."""
    handler = getattr(serving, "openai_serving_responses", None)
    if handler is None:
        return

    async def in_background(*arguments: Any) -> None:
        keeping = _KEEPING.get()
        assert keeping is not None
        await keeping.make(lambda: keeping.long.leaving_out(handler).responses_full_generator(*arguments))

    async def in_background_as_stream(*arguments: Any) -> None:
        keeping = _KEEPING.get()
        assert keeping is not None
        await keeping.make_stream(handler.responses_stream_generator(*arguments))

    def follow(_response_id: str) -> AsyncGenerator[str, None]:
        keeping = _KEEPING.get()
        assert keeping is not None
        return keeping.follow()

    handler.enable_store = True
    handler.response_store = _Answers()
    handler.msg_store = _Prompts()
    handler._run_background_request = in_background  # noqa: SLF001
    handler._run_background_request_stream = in_background_as_stream  # noqa: SLF001
    handler.responses_background_stream_generator = follow
