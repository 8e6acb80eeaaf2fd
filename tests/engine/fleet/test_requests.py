"""Requests on their way to a worker: new, resumed from tokens, or on probation."""

from collections.abc import Sequence
from typing import Any

import msgspec

from melld.engine.fleet.request import Live
from melld.engine.fleet.requests import Requests
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.ids import EventId, RequestId, WorkerId

A, B = RequestId("a"), RequestId("b")
W0 = WorkerId("w0")


class Wire:
    """Two requests on one worker, and what was written to it."""

    def __init__(self) -> None:
        self.live = {
            name: Live(request=name, core_request=b"asked", prompt_tokens=3, priority=0, arrived_s=0.0, worker=W0)
            for name in (A, B)
        }
        self.sent: list[tuple[msgspec.Struct, list[Buffer]]] = []
        none: Any = None
        rest = none, none, none, none, lambda: none, lambda: 0.0, self.send, lambda _worker: True
        self.requests = Requests(self.live, *rest)

    def send(self, _worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer]) -> None:
        self.sent.append((message, list(payload)))

    def give_both(self) -> None:
        for live in self.live.values():
            self.requests.give(live, W0)


def test_a_new_request_is_sent_unchanged_and_a_resumed_one_with_its_tokens() -> None:
    """What a client has seen is never recomputed differently."""
    both = Wire()
    both.live[B].log([7, 8])
    both.live[A].cause, both.live[B].cause = EventId(5), EventId(6)
    both.give_both()
    (add, asked), (resume, known) = both.sent
    assert (add, asked) == (wire.AddRequest(A, 0, cause=EventId(5)), [b"asked"])
    assert resume == wire.ResumeRequest(B, 0, cause=EventId(6))
    assert (known[0], msgspec.msgpack.decode(known[1])) == (b"asked", [7, 8])


def test_a_departed_request_counts_as_received_once_the_next_worker_says_so() -> None:
    """A worker that dies before reading a request did not die of it."""
    both = Wire()
    live = both.live[A]
    live.lose_worker(is_suspect=False)
    both.requests.give(live, W0)
    both.requests.taken(wire.RequestTaken(A, live.lease - 1))
    assert not live.taken
    both.requests.taken(wire.RequestTaken(A, live.lease))
    assert live.taken


def test_survivors_of_a_worker_s_death_are_retried_one_at_a_time() -> None:
    """So the one that kills the next worker is identified, and the others are moved on."""
    both = Wire()
    for live in both.live.values():
        live.taken = True
        live.lose_worker(is_suspect=True)
    both.give_both()
    assert [message.request for message, _ in both.sent] == [A]  # type: ignore[attr-defined]
    both.live[B].worker = W0
    both.requests.acquit(A)
    assert [message.request for message, _ in both.sent] == [A, B]  # type: ignore[attr-defined]
    assert both.requests.probation.worker_lost(W0) == frozenset()
