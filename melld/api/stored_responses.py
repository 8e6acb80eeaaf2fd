"""Stored `/v1/responses` results that clients can fetch, continue from, or cancel.

Owns them, each as the JSON that its client got, in the daemon's memory: of each key's the latest, bounded in count and
in bytes.  No key sees another's.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Set
from typing import Any

import msgspec

from melld.api.answers import Answer, Refusal, bad
from melld.config_server import ServerConfig


class Kept(msgspec.Struct, kw_only=True):
    """What of an answer outlives the daemon."""

    body: bytes
    messages: list[Any]
    """Its prompt, in vLLM's form: the next one continues it."""
    size: int
    background: bool = False
    is_done: bool = True
    events: list[str] | None = None
    """Its stream, if it is made in the background as one."""


class LeftResponse(Kept, kw_only=True):
    """An answer as one daemon leaves it to its successor."""

    owner: bytes
    response_id: str


class Stored(Kept, kw_only=True):
    """An answer, complete or still being made."""

    is_elsewhere: bool = False
    """An earlier daemon made it, or is still making it."""
    work: asyncio.Task[Any] | None = None
    """Makes it in the background."""
    failure: Answer | None = None
    news: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set, and replaced, when there are more events, or when it is done."""

    def said(self) -> dict[str, Any]:
        """Return it, parsed."""
        return dict(msgspec.json.decode(self.body))

    def add(self, event: str, body: bytes | None) -> None:
        """Add an event of its stream, unless it has ended; `body`: the current answer, if the event contains it."""
        assert self.events is not None
        if self.is_done:
            return
        self.events.append(event)
        self.size += len(event)
        self.body = self.body if body is None else body
        self._tell()

    def done(self, body: bytes) -> None:
        """End it with a result."""
        self.body, self.is_done = body, True
        self._tell()

    def end(self, **changes: Any) -> None:
        """End it without a result."""
        self.done(msgspec.json.encode(self.said() | changes))

    def fail(self, answer: Answer) -> None:
        """End it with an error, unless it has been cancelled."""
        if not self.is_done:
            self.failure = answer
            self.end(status="failed", error={"code": answer.code, "message": answer.message})

    async def follow(self, after: int = -1) -> AsyncGenerator[str, None]:
        """Yield the events of its stream after this one, to its end.

        Raises:
            Refusal: what it failed with.
        """
        assert self.events is not None
        sent = after + 1
        while True:
            news, is_done, until = self.news, self.is_done, len(self.events)
            while sent < until:
                yield self.events[sent]
                sent += 1
            if is_done:
                break
            if news is self.news:
                await news.wait()
        if self.failure is not None:
            raise Refusal.of(self.failure)

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class StoredResponses:
    """Keeps answers by owner and id while the owner is among `owners`.  One per daemon."""

    def __init__(self, limits: Callable[[], ServerConfig], owners: Callable[[], Set[bytes]]) -> None:
        self._limits = limits
        self._owners = owners
        self._of: defaultdict[bytes, dict[str, Stored]] = defaultdict(dict)
        """Of each owner, the oldest first."""
        self._taken: set[tuple[bytes, str]] = set()
        """What an earlier daemon has left."""

    def find(self, owner: bytes, response_id: str, param: str = "response_id") -> Stored:
        """Return an answer of this owner.

        Raises:
            Refusal: 404, there is none of this id.
        """
        found = self._of[owner].get(response_id)
        if found is None:
            message = f"no response {response_id[:200]} for this key, or it is no longer stored"
            raise Refusal(404, message, code="response_not_found", param=param)
        return found

    def follow(self, owner: bytes, response_id: str, after: str | None) -> AsyncGenerator[str, None]:
        """Return the stream of an answer that is or was made in the background, after this event.

        Raises:
            Refusal: 404; 400, it has no stream, or no event can have this number.
        """
        found = self.find(owner, response_id)
        if found.events is None:
            raise bad("stream", "only a streamed background response can be streamed again")
        if after is not None and not after.isdecimal():
            raise bad("starting_after", "starting_after is the sequence_number of an event")
        return found.follow(-1 if after is None else int(after))

    def check_new(self, owner: bytes, response_id: str) -> None:
        """Refuse the id of an answer that is being made in the background.

        Raises:
            Refusal: 409.
        """
        found = self._of[owner].get(response_id)
        if found is not None and not found.is_done:
            message = f"the response {response_id} is still in progress"
            raise Refusal(409, message, code="response_in_progress", param="request_id")

    def put(self, owner: bytes, response_id: str, stored: Stored) -> None:
        """Keep an answer.

        Drop the oldest that there is no room for, but none that is still in progress, and those of keys that are gone.
        """
        for gone in self._of.keys() - self._owners():
            del self._of[gone]
        kept, limits = self._of[owner], self._limits()
        kept.pop(response_id, None)
        kept[response_id] = stored
        size = sum(one.size for one in kept.values())
        for oldest, one in list(kept.items()):
            if len(kept) <= limits.max_stored_responses and size <= limits.max_stored_response_bytes:
                break
            if one.is_done:
                size -= one.size
                del kept[oldest]

    def left(self) -> list[LeftResponse]:
        """Return all answers, for the next daemon."""
        return [
            LeftResponse(owner=owner, response_id=name, **_kept(one))
            for owner, kept in self._of.items()
            for name, one in kept.items()
        ]

    def take(self, left: Iterable[LeftResponse]) -> None:
        """Keep an earlier daemon's answers, or the rest of those that it was making."""
        for one in left:
            if (known := self._of[one.owner].get(one.response_id)) is None:
                if (one.owner, one.response_id) in self._taken:  # and deleted since
                    continue
                self._taken.add((one.owner, one.response_id))
                self.put(one.owner, one.response_id, Stored(**_kept(one), is_elsewhere=True))
            elif known.is_elsewhere and not known.is_done and one.is_done:
                known.events, known.size = one.events, one.size
                known.done(one.body)

    def maker_ended(self) -> None:
        """Fail the answers that an earlier daemon was still making when it ended."""
        for kept in self._of.values():
            for one in kept.values():
                if one.is_elsewhere:
                    one.fail(Answer(500, "the daemon that was generating it has exited", code="daemon_ended"))

    def cancel(self, owner: bytes, response_id: str) -> bytes:
        """Cancel an answer and return it; return an already cancelled one as it is.

        Raises:
            Refusal: 404; 400, it is not made in the background; 409, it is done.
        """
        found = self.find(owner, response_id)
        if not found.background:
            message = "only a background response can be cancelled; to cancel any other, close its connection"
            raise Refusal(400, message, code="not_in_background", param="response_id")
        if not found.is_done:
            found.end(status="cancelled")
            _stop(found)
        elif (status := found.said()["status"]) != "cancelled":
            raise Refusal(409, f"the response is already {status}", code="response_done", param="response_id")
        return found.body

    def delete(self, owner: bytes, response_id: str) -> bytes:
        """Delete a response, cancelling it if it is running; return what OpenAI's service returns.

        Raises:
            Refusal: 404.
        """
        found = self.find(owner, response_id)
        del self._of[owner][response_id]
        found.done(found.body)
        _stop(found)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})


def _kept(answer: Kept) -> dict[str, Any]:
    """Return the fields that outlive the daemon, for another object: the stream may go on."""
    fields = {name: getattr(answer, name) for name in Kept.__struct_fields__}
    return fields | {"events": answer.events and [*answer.events]}


def _stop(stored: Stored) -> None:
    if stored.work is not None:
        stored.work.cancel()


ASKED: dict[str, dict[str, Callable[[StoredResponses, bytes, str], bytes]]] = {
    "/v1/responses/{response_id}": {
        "GET": lambda store, owner, response_id: store.find(owner, response_id).body,
        "HEAD": lambda store, owner, response_id: store.find(owner, response_id).body,
        "DELETE": StoredResponses.delete,
    },
    "/v1/responses/{response_id}/cancel": {"POST": StoredResponses.cancel},
}
"""What clients may ask of a stored answer, by route and method."""
