"""Requests on their way to a worker: from their beginning, from their tokens, or when it is their turn."""

from collections.abc import Sequence

import msgspec

from melld.engine.fleet.delivery import Delivery
from melld.engine.fleet.request import Live
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
        self.delivery = Delivery(self.live, self.send)

    def send(self, _worker: WorkerId, message: msgspec.Struct, payload: Sequence[Buffer]) -> None:
        self.sent.append((message, list(payload)))

    def give_both(self) -> None:
        for live in self.live.values():
            self.delivery.give(live, W0)


def test_a_new_request_is_sent_as_it_came_and_another_with_its_tokens() -> None:
    """What a client has seen is never computed a second time in another way."""
    both = Wire()
    both.live[B].log([7, 8])
    both.live[A].cause, both.live[B].cause = EventId(5), EventId(6)
    both.give_both()
    (add, asked), (resume, known) = both.sent
    assert (add, asked) == (wire.AddRequest(A, 0, cause=EventId(5)), [b"asked"])
    assert resume == wire.ResumeRequest(B, 0, cause=EventId(6))
    assert (known[0], msgspec.msgpack.decode(known[1])) == (b"asked", [7, 8])


def test_one_that_has_left_a_worker_counts_as_taken_when_the_next_one_says_so() -> None:
    """A worker that dies before it has read a request has not died of it."""
    both = Wire()
    live = both.live[A]
    live.lose_worker(is_suspect=False)
    both.delivery.give(live, W0)
    both.delivery.taken(wire.RequestTaken(A, live.lease - 1))
    assert not live.taken
    both.delivery.taken(wire.RequestTaken(A, live.lease))
    assert live.taken


def test_of_those_that_were_there_when_a_worker_died_one_goes_on_at_a_time() -> None:
    """The one that kills the next worker too is known, and the others are given on."""
    both = Wire()
    for live in both.live.values():
        live.taken = True
        live.lose_worker(is_suspect=True)
    both.give_both()
    assert [message.request for message, _ in both.sent] == [A]  # type: ignore[attr-defined]
    both.live[B].worker = W0
    both.delivery.acquit(A)
    assert [message.request for message, _ in both.sent] == [A, B]  # type: ignore[attr-defined]
    assert both.delivery.worker_lost(W0) == frozenset()
