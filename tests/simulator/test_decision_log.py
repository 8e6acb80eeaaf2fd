"""The decision log: an outsider can audit every decision, and the log's facts give the same decisions again."""

import json
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld import events
from melld.decision_log import Record, decision_record, encode
from melld.scheduler.policies import POLICIES
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from tests.simulator.audit import Auditor
from tests.simulator.setups import MACHINES, SMALL, scheduler, small_load

DECISIONS = {"place", "queue", "move", "activate", "retire"}


def log_of(policy: str, machines: SimulatorSettings, seed: int = 1) -> list[bytes]:
    """The lines of the decision log of one small simulation."""
    lines: list[bytes] = []
    load = small_load(seed)
    Simulation(machines, load, scheduler(policy, machines), lambda record: lines.append(encode(record))).run()
    return lines


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_outsider_finds_no_fault(policy: str, machines: str) -> None:
    """Capacity, one owner, lifecycles: whoever runs the daemon can check them without trusting us."""
    chosen = MACHINES[machines]
    auditor = Auditor(by_instant=chosen.paper_slots).read(log_of(policy, chosen))
    assert auditor.faults == []
    assert auditor.kinds["place"] == auditor.kinds["finish"] > 50
    assert auditor.kinds["move"] == auditor.kinds["moved"] or chosen.failure_rate or chosen.link


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_facts_of_a_log_give_its_decisions_again(policy: str, machines: str) -> None:
    """A decision that somebody questions can be reproduced from the log alone."""
    chosen = MACHINES[machines]
    steps = by_step(log_of(policy, chosen))
    assert replay(policy, chosen, steps) == {
        step: [record for record in records if is_decision(record)] for step, records in steps.items()
    }


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    machines=st.sampled_from(sorted(MACHINES)),
    seed=st.integers(0, 2**32),
    rate_per_s=st.sampled_from([0.5, 2.0, 8.0]),
)
def test_an_outsider_finds_no_fault_at_any_load(policy: str, machines: str, seed: int, rate_per_s: float) -> None:
    """Idle, busy and overloaded clusters obey the same laws."""
    chosen = msgspec.structs.replace(MACHINES[machines], seed=seed)
    lines: list[bytes] = []
    load = small_load(seed, rate_per_s, seconds=40.0)
    Simulation(chosen, load, scheduler(policy, chosen), lambda record: lines.append(encode(record))).run()
    auditor = Auditor(by_instant=chosen.paper_slots).read(lines)
    assert auditor.faults == []
    assert auditor.kinds["finish"] == len(load)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_writes_the_same_bytes(policy: str) -> None:
    """Two people who compare notes must be able to compare bytes."""
    assert log_of(policy, MACHINES["slow, faulty moves"]) == log_of(policy, MACHINES["slow, faulty moves"])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("place", "has no worker"),
        ("arrive", "does not wait"),
        ("moved", "moves already|moved|never|not on the source|does not move|has no worker|holds"),
        ("activate", "is not awake"),
        ("finish", "never finished"),
    ],
)
def test_the_auditor_misses_no_lost_record(kind: str, why: str) -> None:
    """An auditor that cannot find faults proves nothing."""
    lines = log_of("load-balance-eager", SMALL)
    lost = next(index for index, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    faults = Auditor().read(lines[:lost] + lines[lost + 1 :]).faults
    assert faults
    assert any(word in fault for word in why.split("|") for fault in faults)


def test_the_auditor_sees_a_worker_that_holds_too_much() -> None:
    """The one law that costs clients their tokens when it is broken."""
    lines = log_of("best-fit", SMALL)
    smaller = [line.replace(b'"capacity_bytes":1600000', b'"capacity_bytes":800000') for line in lines]
    assert any("holds" in fault for fault in Auditor().read(smaller).faults)


def test_a_refused_request_is_arrived_and_finished() -> None:
    """A request that is too large must not look lost."""
    refuse = events.RefuseRequest("too large", "r9", 5, 4)  # type: ignore[arg-type]
    record = decision_record(1.5, refuse)
    assert record == {
        "at": 1.5, "kind": "finish", "request": "r9", "kv_bytes": 5, "capacity_bytes": 4, "cause": "refused"
    }  # fmt: skip


def by_step(lines: list[bytes]) -> dict[int, list[Record]]:
    """The records of each step, from 1 to the last; a step that left none is the beginning of an epoch."""
    steps: dict[int, list[Record]] = defaultdict(list)
    for line in lines:
        record = json.loads(line)
        steps[record["step"]].append(record)
    return {step: steps[step] for step in range(1, max(steps) + 1)}


def is_decision(record: Record) -> bool:
    """Whether the scheduler, not the world, is the source of the record."""
    return record["kind"] in DECISIONS or record.get("cause") == "refused"


def replay(policy: str, machines: SimulatorSettings, steps: dict[int, list[Record]]) -> dict[int, list[Record]]:
    """Feed the facts to a fresh scheduler; returns its decisions, as records of each step."""
    fresh = scheduler(policy, machines)
    epochs = 0
    sizes: dict[str, int] = {}
    decided: dict[int, list[Record]] = {}
    for step, records in steps.items():
        facts = [record for record in records if not is_decision(record)]
        if machines.instant_moves:
            facts = [fact for fact in facts if fact["kind"] != "moved"]
        sizes.update((fact["request"], fact["kv_bytes"]) for fact in facts if fact["kind"] in ("arrive", "grow"))
        if facts:
            event = as_event(facts)
        else:
            event = events.EpochStarted(epochs * machines.epoch_s)
            epochs += 1
        vias = {record["request"]: record["via"] for record in records if record["kind"] == "move"}
        decided[step] = [
            decision_record(
                event.at_s, command, sizes.get(getattr(command, "request", ""), 0),
                vias.get(getattr(command, "request", ""), "kv"), step,
            )
            for command in fresh.handle(event)
        ]  # fmt: skip
    return decided


def as_event(facts: list[Record]) -> Any:
    """The event that the facts of one step were."""
    fact = facts[0]
    at_s = fact["at"]
    match fact["kind"]:
        case "worker":
            return events.WorkerUp(at_s, fact["worker"], fact["capacity_bytes"], fact["slots"], fact["machine"])
        case "arrive":
            return events.RequestArrived(at_s, fact["request"], fact["kv_bytes"], fact["prompt_tokens"])
        case "grow":
            return events.RequestsGrew(at_s, {one["request"]: one["kv_bytes"] for one in facts})
        case "finish":
            return events.RequestFinished(at_s, fact["request"])
        case "preempt":
            return events.RequestPreempted(at_s, fact["request"])
        case "moved" if fact["outcome"] == "committed":
            return events.MoveCommitted(at_s, fact["request"])
        case "moved":
            return events.MoveAborted(at_s, fact["request"], reason=fact["cause"])
    raise AssertionError(fact)
