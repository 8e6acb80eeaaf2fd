"""Keeps the answers of vLLM's serving class for `/v1/responses` in `StoredResponses`, in place of its own stores.

Owns the seam: vLLM's class keeps responses, prompts and tasks in dictionaries that never shrink and ignore API keys.
Each call gets a copy of it whose dictionaries hold only what belongs to the call; `Keeping` generates its background
responses.
"""

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec
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
from melld.engine.frontend.turns import Turns

log = logging.getLogger("melld.api")

_DUMP = CALLS["/v1/responses"].dump
_LAST = tuple(f"event: response.{end}\ndata: " for end in ("completed", "incomplete"))


class _Ended(msgspec.Struct):
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
        turns: Turns,
    ) -> None:
        """Take the call, its body's size, and a context in which it `goes_on` in the background."""
        self._store = store
        self._owner = owner
        self._request = request
        self._size = size
        self._goes_on = goes_on
        self._turns = turns
        self._answers: dict[str, ResponsesResponse] = {}
        """By id: the previous response, and this call's if it is to be stored."""
        self._prompts: dict[str, list[Any]] = {}
        """Their messages, in vLLM's form."""

    async def prepare(self, limits: ServerConfig, off_loop: OffLoop) -> None:
        """Find the response that this one continues from.

        Raises:
            Refusal: 404, there is none; 409, this one or that one is still in progress; 400.
        """
        request = self._request
        if request.background and not limits.max_stored_responses:
            raise bad("background", "this server does not store responses")
        self._store.check_new(self._owner, request.request_id)
        if (wanted := request.previous_response_id) is None:
            return
        found = self._store.find(self._owner, wanted, "previous_response_id")
        if not found.is_done:
            message = f"the response {wanted} is still in progress"
            raise Refusal(409, message, code="response_in_progress", param="previous_response_id")
        if len(found.messages) > limits.max_message_parts:
            message = f"a conversation has at most {limits.max_message_parts} messages"
            raise bad("previous_response_id", message)
        self._size += found.size
        self._prompts[wanted] = found.messages
        previous = await off_loop.run(len(found.body), ResponsesResponse.model_validate_json, found.body)
        if previous.status in ("failed", "cancelled"):
            raise bad("previous_response_id", f"the response {wanted} is {previous.status}")
        self._answers[wanted] = previous

    def serving(self, handler: Any) -> Any:
        """Return vLLM's serving class for this call alone."""
        own = copy.copy(handler)
        own.enable_store, own.response_store, own.msg_store = True, self._answers, self._prompts

        def in_background(*arguments: Any) -> Coroutine[Any, Any, None]:
            stored = self._queue()
            another = self.serving(handler)  # otherwise `own`, which holds this function, would refer to itself
            if self._request.stream:
                return self._make_stream(stored, another.responses_stream_generator(*arguments))
            return self._make(stored, another, arguments)

        own._run_background_request = own._run_background_request_stream = in_background  # noqa: SLF001
        own.responses_background_stream_generator = lambda made: self._store.find(self._owner, made).follow()
        return own

    async def kept(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, and store it."""
        result = await work
        if self._request.background:
            return result
        if result.stream is not None:
            return Result(stream=self._watched(result.stream))
        self._keep(result.body)
        return result

    async def _watched(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            async for text in stream:
                if text.startswith(_LAST):
                    last = msgspec.json.decode(text.partition("data: ")[2], type=_Ended)
                    self._keep(bytes(last.response))
                yield text
        finally:
            await stream.aclose()

    def _keep(self, body: bytes) -> None:
        """Store a response if requested."""
        response_id = self._request.request_id
        if (messages := self._prompts.get(response_id)) is not None:
            size = self._size + len(body)
            self._store.put(self._owner, response_id, Stored(body=body, messages=messages, size=size))

    def _queue(self) -> Stored:
        """Reserve a place for a response generated in the background."""
        response_id = self._request.request_id
        body, messages = self._answers[response_id].model_dump_json(**_DUMP).encode(), self._prompts[response_id]
        stored = Stored(body=body, messages=messages, size=self._size, background=True, is_done=False)
        stored.events = [] if self._request.stream else None
        self._store.put(self._owner, response_id, stored)
        return stored

    async def _make(self, stored: Stored, handler: Any, arguments: tuple[Any, ...]) -> None:
        """Generate the response in the background."""
        long = LongAnswer(self._turns)
        with self._working(stored):
            made = await long.leaving_out(handler).responses_full_generator(*arguments)
            if isinstance(made, ErrorResponse):
                raise ServingFault(made)
            self._finish(stored, await long.encode(made, _DUMP))

    async def _make_stream(self, stored: Stored, events: AsyncGenerator[Any, None]) -> None:
        """Generate the response in the background, event by event."""
        with self._working(stored):
            async with contextlib.aclosing(events):
                async for event in events:
                    response = getattr(event, "response", None)
                    body = None if response is None else response.model_dump_json(**_DUMP).encode()
                    stored.add(event_text(event), body)
            self._finish(stored, stored.body)

    def _finish(self, stored: Stored, body: bytes) -> None:
        """Store the result, unless the response has since been cancelled or deleted."""
        if not stored.is_done:
            stored.size += len(body)
            stored.done(body)
            self._store.put(self._owner, self._request.request_id, stored)

    @contextlib.contextmanager
    def _working(self, stored: Stored) -> Iterator[None]:
        """Run the background work in this task; record how it fails."""
        stored.work = asyncio.current_task()
        try:
            with self._goes_on():
                yield
        except Exception as error:
            answer = answer_to(error, frozenset(self._request.model_fields_set))
            if needs_traceback(error, answer):
                log.error("request %s failed", self._request.request_id, exc_info=error)
            stored.fail(answer)
        finally:
            stored.work = None
