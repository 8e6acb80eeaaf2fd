"""Reports that come twice, late, or not at all: no token is delivered twice, and gaps are noticed."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from melld.driver.executor import Executor
from melld.driver.report import MoveMeters
from melld.engine.fleet import request as requests
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Slot
from melld.engine.fleet.reports import Turn, WorkerFacts
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import MAX_FRAME_BYTES
from melld.engine.wire.spec import WorkerSpec
from melld.errors import InputTooLarge
from melld.ids import EventId, RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.scheduler.events import AnyEvent
from tests.engine.fleet.virtual_worker import VirtualHost


def facts() -> WorkerFacts:
    return WorkerFacts(0, KvGeometry(block_tokens=16, block_bytes=64), 4)


@given(st.lists(st.integers(1, 12), max_size=40))
def test_each_report_is_taken_once_and_in_order(numbers: list[int]) -> None:
    """However the reports are shuffled, those taken are 1, 2, 3, ... without a gap."""
    worker = facts()
    taken = [number for number in numbers if worker.turn(number) is Turn.NEXT]
    assert taken == list(range(1, len(taken) + 1))


def test_a_missing_report_is_noticed_and_a_duplicate_ignored() -> None:
    """The one means a broken worker, the other nothing."""
    worker = facts()
    turns = [worker.turn(number) for number in (1, 1, 3, 2, 1)]
    assert turns == [Turn.NEXT, Turn.STALE, Turn.GAP, Turn.NEXT, Turn.STALE]


class Asked(msgspec.Struct):
    """A request, as far as the fleet knows one."""

    request_id: str = "r"
    prompt_token_ids: tuple[int, ...] = (1, 2, 3)
    prompt_embeds: None = None
    pooling_params: None = None
    priority: int = 0


class Output(msgspec.Struct):
    """One request's share of a step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


class Outputs(msgspec.Struct):
    """A step's outputs."""

    outputs: list[Output]
    scheduler_stats: None = None


class PlainCodec:
    """Its own encoding: the fleet reads none."""

    def encode_request(self, core_request: Asked) -> bytes:
        return msgspec.msgpack.encode(core_request)

    def decode_outputs(self, buffers: Sequence[bytes]) -> Outputs:
        return msgspec.msgpack.decode(buffers[0], type=Outputs)


SLOT = Slot(worker=WorkerId("w0"), device="cpu:0", spec=WorkerSpec(worker="w0", model_path="", device_kind="cpu"))
READY = wire.WorkerReady(
    total_blocks=8,
    geometry=KvGeometry(16, 64),
    max_requests=4,
    supported_tasks=[],
    load_s=0.0,
    ready_response=b"",
)


class Listener:
    """Hears everything and decides nothing."""

    executor: Executor

    def handle(self, event: AnyEvent) -> None: ...


def alone() -> Fleet:
    """Return a fleet without a driver."""
    listener = Listener()
    fleet = Fleet([SLOT], VirtualHost(), PlainCodec(), lambda: listener, lambda: 0.0)
    listener.executor = Executor(fleet, lambda: 0.0, MoveMeters(CollectorRegistry()))
    return fleet


def said(fleet: Fleet, step: int, token: int) -> None:
    done = wire.StepDone(step, 0.1, wire.BlockReport(1, 8, 0, {}), leases={}, gone=[])
    fleet.worker_said(SLOT, done, [msgspec.msgpack.encode(Outputs([Output("r", [token])]))])


@pytest.mark.parametrize("spoilt", [1, 3], ids=["repeated", "with one missing before it"])
def test_tokens_of_an_out_of_order_report_are_not_delivered(spoilt: int) -> None:
    """A request's log, from which it would resume elsewhere, has each token once."""
    fleet = alone()
    fleet.worker_said(SLOT, READY, [])
    fleet.requests.admit(Asked())
    fleet.requests.place(RequestId("r"), SLOT.worker)
    for step, token in ((1, 7), (spoilt, 8), (2, 9)):
        said(fleet, step, token)
    assert fleet.live[RequestId("r")].output_token_ids == [7, 9]


def test_a_report_of_a_worker_stopped_while_becoming_ready_is_ignored() -> None:
    """Its first report crosses the stop command, and refers to what was never recorded."""
    fleet = alone()
    said(fleet, 1, 7)
    assert not fleet.workers


def test_a_late_rejection_fails_nobody() -> None:
    """The request has left that worker, and goes on where it has been placed since."""
    fleet, request = alone(), RequestId("r")
    fleet.worker_said(SLOT, READY, [])
    fleet.requests.admit(Asked())
    fleet.requests.place(request, SLOT.worker, EventId(1))
    fleet.requests.suspend(request)
    fleet.requests.place(request, SLOT.worker, EventId(2))
    for cause, left in ((1, [request]), (2, [])):
        fleet.worker_said(SLOT, wire.RequestRejected(request=request, reason="no memory", cause=EventId(cause)), [])
        assert list(fleet.live) == left


def test_an_input_too_large_for_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would take the wire for out of step and exit, and so would the next."""
    assert requests.MAX_REQUEST_BYTES <= MAX_FRAME_BYTES // 2
    monkeypatch.setattr(requests, "MAX_REQUEST_BYTES", 1000)
    fleet = alone()
    with pytest.raises(InputTooLarge):
        fleet.requests.admit(Asked("x" * 1001))
    assert not fleet.live
