"""The decision log: an outsider can audit every decision, and the logged facts reproduce them."""

import functools
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.decisions.records import decision_record, encode, is_decision
from melld.decisions.replay import UnusableLog, replay
from melld.scheduler import events
from melld.simulator.experiment import ALL_POLICIES, SchedulerChoices, run_policy
from melld.simulator.settings import SimulatorSettings
from tests.decisions.audit import Auditor
from tests.effort import examples
from tests.simulator.setups import MACHINES, SMALL, small_load


@functools.cache
def log_of(policy: str, machines: SimulatorSettings, seed: int = 1) -> list[bytes]:
    """Return the decision log's lines of one small simulation, which is run once."""
    lines: list[bytes] = []
    load = small_load(seed)
    run_policy(policy, machines, load, SchedulerChoices(), lambda record: lines.append(encode(record)))
    return lines


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_auditor_finds_no_fault(policy: str, machines: str) -> None:
    """Capacity, single ownership, lifecycles: users can check them without trusting us."""
    chosen = MACHINES[machines]
    auditor = Auditor(by_instant=chosen.paper_slots or chosen.link is not None).read(log_of(policy, chosen))
    assert auditor.faults == []
    displaced = auditor.kinds["place"] - auditor.kinds["finish"]
    assert auditor.kinds["finish"] > 50
    assert displaced > 0 if chosen.machine_lost_at_s else displaced == 0
    assert auditor.kinds["move"] == auditor.kinds["moved"] or chosen.failure_rate or chosen.link


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_logged_facts_reproduce_the_decisions(policy: str, machines: str) -> None:
    """A questionable decision can be reproduced from the log alone."""
    chosen = MACHINES[machines]
    records = [json.loads(line) for line in log_of(policy, chosen)]
    again = replay(records, ALL_POLICIES)
    assert again.difference is None
    assert (again.records, again.decisions) == (len(records), sum(map(is_decision, records)))
    assert again.decisions > 100


@pytest.mark.parametrize("machines", MACHINES)
def test_the_end_of_a_move_names_the_event_that_decided_it(machines: str) -> None:
    """From the end of a move the log leads back to its reason."""
    decided: dict[str, int] = {}
    ends = 0
    for record in map(json.loads, log_of("mell-plus", MACHINES[machines])):
        if record["kind"] == "move":
            decided[record["request"]] = record["step"]
        elif record["kind"] == "moved":
            ends += 1
            assert record["cause_step"] == decided[record["request"]], record
    assert ends > 5


@pytest.mark.parametrize("kind", ["place", "move", "activate", "retire", "arrive", "grow"])
def test_a_replay_detects_tampering(kind: str) -> None:
    """A replay that agrees with everything proves nothing."""
    records = [json.loads(line) for line in log_of("mell-plus", SMALL)]
    changed = [index for index, record in enumerate(records) if record["kind"] == kind][3]
    if kind in ("arrive", "grow"):
        records[changed]["kv_bytes"] *= 20
    else:
        del records[changed]
    again = replay(records, ALL_POLICIES)
    assert again.difference is not None


def test_a_truncated_log_agrees_as_far_as_it_goes() -> None:
    """A killed daemon stops writing, wherever it is in a step."""
    records = [json.loads(line) for line in log_of("mell-plus", SMALL)]
    decisions = [index for index, record in enumerate(records) if is_decision(record)]
    for end in decisions[:100]:
        assert replay(records[:end], ALL_POLICIES).difference is None


def test_another_policy_decides_differently() -> None:
    """A log can be replayed with any policy; the first difference is reported."""
    records = [json.loads(line) for line in log_of("mell-plus", SMALL)]
    again = replay(records, ALL_POLICIES, "best-fit")
    assert (again.policy, again.difference is not None) == ("best-fit", True)


def test_contradictory_facts_are_not_a_valid_log() -> None:
    """Half a log, or two in one, is not mistaken for a wrong decision."""
    records = [json.loads(line) for line in log_of("best-fit", SMALL)]
    twice = next(record for record in records if record["kind"] == "arrive")
    last = records[-1]
    earlier = {**twice, "at": last["at"] - 60.0, "step": last["step"] + 1}
    torn = [{"at": 0.0, "kind": "move", "step": 1}, {"at": 0.0, "kind": "epoch", "step": "one"}]
    for broken in ([], records[1:], [*records, earlier], *([records[0], one] for one in torn)):
        with pytest.raises(UnusableLog):
            replay(broken, ALL_POLICIES)


@settings(max_examples=examples(25), deadline=None)
@given(
    policy=st.sampled_from(sorted(ALL_POLICIES)),
    machines=st.sampled_from(sorted(MACHINES)),
    seed=st.integers(0, 2**32),
    rate_per_s=st.sampled_from([0.5, 2.0, 8.0]),
)
def test_the_auditor_finds_no_fault_at_any_load(policy: str, machines: str, seed: int, rate_per_s: float) -> None:
    """Idle, busy and overloaded clusters obey the same laws."""
    chosen = msgspec.structs.replace(MACHINES[machines], seed=seed)
    lines: list[bytes] = []
    load = small_load(seed, rate_per_s, seconds=40.0)
    run_policy(policy, chosen, load, SchedulerChoices(), lambda record: lines.append(encode(record)))
    auditor = Auditor(by_instant=chosen.paper_slots or chosen.link is not None).read(lines)
    assert auditor.faults == []
    assert auditor.kinds["finish"] == len(load)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_same_seed_writes_the_same_bytes(policy: str) -> None:
    """Two people who compare notes must be able to compare bytes."""
    chosen = MACHINES["slow, faulty moves"]
    assert log_of(policy, chosen) == log_of.__wrapped__(policy, chosen)


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
    lines = log_of("load-balance", SMALL)
    lost = next(index for index, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    faults = Auditor().read(lines[:lost] + lines[lost + 1 :]).faults
    assert faults
    assert any(word in fault for word in why.split("|") for fault in faults)


def test_the_auditor_notices_an_overfull_worker() -> None:
    """The one law that costs clients their tokens when it is broken."""
    lines = log_of("best-fit", SMALL)
    smaller = [line.replace(b'"capacity_bytes":1600000', b'"capacity_bytes":800000') for line in lines]
    assert any("holds" in fault for fault in Auditor().read(smaller).faults)


@pytest.mark.parametrize(("via", "faults"), [("kv", 1), ("tokens", 0)])
def test_a_request_resumed_from_tokens_holds_nothing_until_it_starts(via: str, faults: int) -> None:
    """Others may take its room meanwhile: vLLM then queues it, and nothing is evicted."""
    workers = [{"kind": "worker", "worker": worker, "capacity_bytes": 100} for worker in ("w0", "w1")]
    awake = [{"kind": "activate", "worker": worker, "cause": "arrival"} for worker in ("w0", "w1")]
    sizes = {"stays": ("w0", 50), "comes": ("w1", 40)}
    begun: list[dict[str, object]] = []
    for request, (worker, kv_bytes) in sizes.items():
        begun.append({"kind": "arrive", "request": request, "kv_bytes": kv_bytes})
        begun.append({"kind": "place", "request": request, "worker": worker, "kv_bytes": kv_bytes})
        begun.append({"kind": "grow", "request": request, "kv_bytes": kv_bytes})
    move = {"kind": "move", "request": "comes", "source": "w1", "destination": "w0", "kv_bytes": 40, "via": via}
    moved = {"kind": "moved", "request": "comes", "outcome": "committed", "via": via}
    ends = [{"kind": "grow", "request": "stays", "kv_bytes": 70}]
    ends += [{"kind": "finish", "request": request} for request in sizes]
    history = [{"kind": "scheduler"}, *workers, *awake, *begun, move, moved, *ends]
    lines = [json.dumps({"at": float(at), **record}) for at, record in enumerate(history)]
    assert len(Auditor().read(lines).faults) == faults


def test_a_refused_request_arrives_and_finishes() -> None:
    """A request that is too large must not look lost."""
    refuse = events.RefuseRequest("too large", "r9", 5, 4)  # type: ignore[arg-type]
    record = decision_record(1.5, refuse)
    assert record == {
        "at": 1.5, "kind": "finish", "request": "r9", "kv_bytes": 5, "capacity_bytes": 4, "cause": "refused"
    }  # fmt: skip
