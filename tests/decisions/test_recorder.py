"""The daemon's log is complete: any history of a scheduler can be rebuilt from its records alone."""

import json
import typing
from typing import Any

import msgspec
import pytest

from melld.decisions.recorder import Recorder
from melld.decisions.records import Record, decision_record, encode, header_record, is_decision
from melld.decisions.replay import Replayed, UnusableLog, as_event, replay
from melld.decisions.stories import Happened, stories_of
from melld.scheduler import events as e
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role
from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.driving import scheduler_with
from tests.scheduler.machine import PolicyMachine, machine_of


def replayed(records: list[Record], policy: str | None = None) -> Replayed:
    """Replay the log after a round trip through its bytes."""
    read = [json.loads(encode(record)) for record in records]
    return replay(read, ALL_POLICIES, policy)


class RecordedMachine(PolicyMachine):
    """Plays all legal events in any order, recorded as the driver reports them: only grown sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []

    def tell(self, event: e.AnyEvent) -> list[e.AnyCommand]:
        if isinstance(event, e.RequestsGrew):
            known = self.scheduler.cluster.requests
            sizes = {name: size for name, size in event.kv_bytes.items() if size > known[name].kv_bytes}
            event = msgspec.structs.replace(event, kv_bytes=sizes)
            if not sizes:
                return []
        commands = super().tell(event)
        self.records += Recorder(self.scheduler).take(self.history[-1], commands)
        return commands

    def teardown(self) -> None:
        if not self.history:
            return
        result = replayed([header_record(self.policy, self.scheduler.settings, 0.0, 1e9, "0.1.0"), *self.records])
        assert result.difference is None
        assert result.decisions == sum(map(len, self.answers))


def recorded(policy: str) -> Any:
    """Return the test case of one policy."""
    machine = type(f"Recorded{policy.title()}", (RecordedMachine,), {"policy": policy, "instant": False})
    case = machine.TestCase
    case.settings = machine_of(policy, False, 20).settings
    return case


TestMellPlus = recorded("mell-plus")
TestLoadBalance = recorded("load-balance")
TestMostFree = recorded("most-free")


def history(*happened: e.AnyEvent, policy: str = "best-fit", workers: int = 0) -> list[Record]:
    """Return the records of these events."""
    scheduler = scheduler_with(workers, policy)
    recorder = Recorder(scheduler)
    records = [header_record(policy, scheduler.settings, 0.0, 1e9, "0.1.0")]
    for number, one in enumerate(happened, start=1):
        event = msgspec.structs.replace(one, id=number)
        records += recorder.take(event, scheduler.handle(event))
    return records


UP = (e.WorkerUp(0.0, "w0", 1000, 4), e.WorkerUp(0.0, "w1", 1000, 4))


def test_events_that_the_scheduler_does_not_hear_are_not_logged() -> None:
    """An auditor never sees the end of a move that was not under way, or of an unknown request."""
    arrived = e.RequestArrived(1.0, "r1", 100)
    late = [e.MoveCommitted(2.0, "r1", "w1"), e.RequestFinished(3.0, "r1"), e.RequestFinished(3.0, "r1")]
    gone = [e.WorkerDown(4.0, "w7"), e.WorkerCapacityChanged(4.0, "w7", 5), e.WorkerSlotsChanged(4.0, "w7", 5)]
    gone.append(e.WorkerSteadied(4.0, "w7"))
    kinds = [record["kind"] for record in history(*UP, arrived, *late, *gone)]
    assert kinds == ["scheduler", "worker", "worker", "arrive", "activate", "place", "finish"]
    partly = history(*UP, e.WorkerDown(4.0, "w7", ("w1", "w8")))
    assert [(one["worker"], one["capacity_bytes"]) for one in partly[3:]] == [("w1", 0)]


def test_a_change_of_slots_repeats_the_capacity() -> None:
    """So that no reader needs the records before."""
    records = history(*UP, e.WorkerSlotsChanged(1.0, "w1", 2))
    assert records[-1] == {"at": 1.0, "kind": "worker", "worker": "w1", "capacity_bytes": 1000, "slots": 2, "step": 3}
    assert replayed(records).difference is None


def test_a_worker_with_zero_capacity_is_not_logged_as_gone() -> None:
    """One of several models may have no memory for a while: its log still replays, and its stories are true."""
    lent = [e.WorkerUp(0.0, "w0", 1000, 0), e.WorkerCapacityChanged(0.0, "w0", 0), e.WorkerSlotsChanged(0.0, "w0", 4)]
    given = [e.WorkerCapacityChanged(1.0, "w0", 1000), e.RequestArrived(2.0, "r1", 100)]
    taken = [e.WorkerCapacityChanged(3.0, "w0", 0), e.WorkerSlotsChanged(3.0, "w0", 3)]
    records = history(*lent, *given, *taken)
    assert replayed(records).difference is None
    assert [line.what for line in stories_of(records).story("r1").lines] == [Happened.ARRIVED, Happened.PLACED]


def test_a_log_of_an_unknown_policy_is_refused() -> None:
    """A log of another version is no proof of a wrong decision."""
    records = history(*UP)
    records[0]["policy"] = "oracle"
    with pytest.raises(UnusableLog, match="oracle"):
        replayed(records)
    records[0].update(policy="best-fit", settings={"wait_deadline_s": "soon"})
    with pytest.raises(UnusableLog, match="another version"):
        replayed(records)
    for missing in ("settings", "policy"):
        del records[0][missing]
        with pytest.raises(UnusableLog, match=r"another version|its policy"):
            replayed(records)


def test_an_operator_s_request_is_part_of_the_log() -> None:
    """A move that no policy would make has its reason in the log, and replays."""
    wish = e.MoveAsked(2.0, "r1", "w1")
    records = history(*UP, e.RequestArrived(1.0, "r1", 100), wish, e.MoveCommitted(3.0, "r1", "w1", "tokens"))
    assert [record["kind"] for record in records[-4:]] == ["ask", "activate", "move", "moved"]
    assert (records[-2]["cause"], records[-1]["via"]) == ("operator", "tokens")
    assert replayed(records).difference is None


SAMPLES: tuple[e.AnyEvent, ...] = (
    e.WorkerUp(1.0, "w0", 1000, 4, 2),
    e.WorkerUp(1.0, "w1", 1000, 4, 2, steady=False),
    e.WorkerSteadied(1.0, "w1"),
    e.WorkerWakeTimeChanged(1.0, "w1", 2.5),
    e.RequestArrived(2.0, "r1", 100, 90, 1, "alice"),
    e.RequestArrived(2.0, "r2", 100, 90, 0, ""),
    e.RequestsGrew(3.0, {"r1": 200, "r2": 300}),
    e.WorkerSharingChanged(3.0, "w0", 50),
    e.EpochStarted(4.0),
    e.MoveAsked(5.0, "r1", "w1"),
    e.MoveCommitted(6.0, "r1"),
    e.MoveAsked(7.0, "r2", "w1"),
    e.MoveAborted(8.0, "r2", "lost"),
    e.RequestPreempted(9.0, "r1"),
    e.RequestResumed(9.5, "r1", 0.25),
    e.WorkerCapacityChanged(10.0, "w1", 900),
    e.WorkerSlotsChanged(11.0, "w1", 3),
    e.WorkerDraining(12.0, "w0"),
    e.WorkerResumed(13.0, "w0"),
    e.WorkersPaced(13.5, {"w0": e.WorkerPace(0.02, 3.0, 4096.0, 1, 90, 0.1), "w1": e.WorkerPace()}),
    e.RequestFinished(14.0, "r1", 20, 6.5),
    e.RequestFinished(14.0, "r2"),
    e.WorkerDown(15.0, "w1"),
    e.WorkerUp(16.0, "w1", 1000, 4, 2),
    e.WorkerDown(17.0, "w0", ("w1",)),
)


def test_every_event_can_be_rebuilt_from_its_records() -> None:
    """A new kind of event that is not logged would make replays diverge long after it was forgotten."""
    assert {type(event) for event in SAMPLES} == set(typing.get_args(e.AnyEvent))
    scheduler = scheduler_with(0)
    recorder = Recorder(scheduler)
    for event in SAMPLES:
        records = [json.loads(encode(record)) for record in recorder.take(event, scheduler.handle(event))]
        assert as_event([record for record in records if not is_decision(record)]) == event


def test_every_decision_has_its_record() -> None:
    """Outsiders can see everything that the scheduler decides."""
    names: dict[str, Any] = {"request": "r1", "worker": "w0", "source": "w0", "destination": "w1", "kv_bytes": 5}
    names |= {"capacity_bytes": 4, "role": Role.PREFILL}
    for kind in typing.get_args(e.AnyCommand):
        known = {field: names[field] for field in kind.__struct_fields__ if field in names}
        record = decision_record(1.0, kind(reason=Reason.ROOM, **known))
        assert is_decision(record)
        assert {**known, "cause": record["cause"]}.items() <= {**names, **record}.items()
