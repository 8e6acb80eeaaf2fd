"""Roles in simulation: hand-overs after the first token, when a split pays, and that nothing changes without one."""

import random
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from melld.decisions.records import Record
from melld.ids import WorkerId
from melld.scheduler.events import AnyCommand, AnyEvent, MoveRequest, RequestFinished, RetireWorker, SetRole
from melld.scheduler.roles import Role, RoleSettings
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, make_scheduler
from melld.simulator.latency import Floats
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import LogNormal, Workload, poisson
from tests.simulator.setups import SMALL, one_by_one

RATE_BYTES_S, GAP_S = 1e8, 0.0055
LONE_STEP_S, TOKEN_S = 0.0202, 0.0001
AUTO = RoleSettings(auto=True)
FIXED = RoleSettings(fixed={WorkerId("w0"): Role.PREFILL, WorkerId("w1"): Role.DECODE})


class Growing(msgspec.Struct, frozen=True):
    """Steps that take a little longer in larger batches."""

    def step_s(self, batch: Floats, context_tokens: Floats) -> Floats:
        return np.asarray(0.02 + 0.0002 * batch + 0.0 * context_tokens)

    def prefill_s(self, tokens: float) -> float:
        return tokens * 0.0001


MACHINE = SimulatorSettings(
    capacity_bytes=20 * SMALL.capacity_bytes,
    bytes_per_token=SMALL.bytes_per_token,
    latency=Growing(),
    gpus=4,
    epoch_s=0.2,
    link=LinkSettings(RATE_BYTES_S, kv_gap_s=GAP_S, copy_cost_s=0.0),
    targets=Targets(itl_s=0.03, sheds=False),
)


class Played(NamedTuple):
    """A simulation's result, and what its scheduler heard and said."""

    report: Report
    events: list[AnyEvent]
    commands: list[AnyCommand]


def simulated(load: Workload, roles: RoleSettings, settings: SimulatorSettings = MACHINE) -> Played:
    scheduler = make_scheduler("mell-slo", settings, SchedulerChoices(roles=roles, retire_after_s=30.0))
    simulation = Simulation(settings, load, scheduler)
    played = Played(None, [], [])  # type: ignore[arg-type]

    def handle(event: AnyEvent) -> list[AnyCommand]:
        played.events.append(event)
        played.commands.extend(commands := scheduler.handle(event))
        return commands

    simulation._decide = handle
    return played._replace(report=simulation.run().report("mell-slo"))


def prompts_and_answers(rate_per_s: float, seed: int = 1, seconds: float = 150.0) -> Workload:
    return poisson(rate_per_s, seconds, LogNormal(1200.0, 0.5, 100.0, 0.8), random.Random(seed))


@pytest.mark.parametrize(("prompt", "last_chunk"), [(500, 500), (2048 + 700, 700)])
def test_the_second_token_waits_only_for_the_last_chunk_s_copy(prompt: int, last_chunk: int) -> None:
    """Earlier chunks are copied during the prefill."""
    wake_both = [(0.2 * number, 100 + 50 * number, 200) for number in range(60)]
    settings = msgspec.structs.replace(MACHINE, gpus=2)
    played = simulated(one_by_one(*wake_both, (25.0, prompt, 101)), FIXED, settings)
    (move,) = [one for one in played.commands if isinstance(one, MoveRequest) and one.request == "r60"]
    assert (move.source, move.destination, move.reason, move.after_first_token) == ("w0", "w1", "role", True)
    (end,) = [one for one in played.events if isinstance(one, RequestFinished) and one.request == "r60"]
    assert end.first_token_s == pytest.approx(25.0 + prompt * TOKEN_S)
    copy_s = last_chunk * SMALL.bytes_per_token / RATE_BYTES_S
    assert end.at_s - end.first_token_s == pytest.approx(copy_s + GAP_S + 100 * LONE_STEP_S)


def test_a_hand_over_is_logged_like_any_move() -> None:
    """Whoever compares splits reads in the decision log what was handed over, and how."""
    load = one_by_one(*((0.2 * number, 100 + 50 * number, 200) for number in range(40)))
    settings, choices = msgspec.structs.replace(MACHINE, gpus=2), SchedulerChoices(roles=FIXED, retire_after_s=30.0)
    records: list[Record] = []
    Simulation(settings, load, make_scheduler("mell-slo", settings, choices), records.append).run()
    moves = [record for record in records if record["kind"] == "move"]
    assert {(move["via"], move["cause"]) for move in moves} == {("kv", "role")}


def test_a_split_keeps_a_tighter_pace_on_no_more_workers() -> None:
    """Mixed workers' prompts would slow the decodes; a split is found automatically, and serves more in time."""
    mixed, split = (simulated(prompts_and_answers(6.0), roles).report for roles in (RoleSettings(), AUTO))
    assert split.migrations > split.requests / 2
    assert split.itl_s.p90 < 0.9 * mixed.itl_s.p90
    assert split.attainment is not None
    assert mixed.attainment is not None
    assert split.attainment > mixed.attainment + 0.04
    assert split.gpu_seconds <= 1.02 * mixed.gpu_seconds


def test_a_prefill_worker_has_a_decode_worker_on_its_machine() -> None:
    """KV is handed over within a machine: a lone prefill worker would keep its requests, and be slow."""
    far = LinkSettings(RATE_BYTES_S, kv_gap_s=GAP_S, copy_cost_s=0.0, kv_between_machines=False)
    machines = msgspec.structs.replace(MACHINE, gpus_per_machine=3, link=far)
    played = simulated(prompts_and_answers(6.0, seconds=90.0), AUTO, machines)
    prefilling = {one.worker for one in played.commands if isinstance(one, SetRole) and one.role is Role.PREFILL}
    assert prefilling
    assert WorkerId("w3") not in prefilling
    alone = msgspec.structs.replace(machines, gpus_per_machine=1)
    assert not any(
        isinstance(one, SetRole) for one in simulated(prompts_and_answers(6.0, seconds=90.0), AUTO, alone).commands
    )


def test_a_loose_pace_or_none_splits_nothing() -> None:
    """Nothing at all changes: each command is the same."""
    for itl_s in (0.06, None):
        loose = msgspec.structs.replace(MACHINE, targets=Targets(itl_s=itl_s, sheds=False))
        mixed, auto = (
            simulated(prompts_and_answers(14.0, seconds=45.0), roles, loose) for roles in (RoleSettings(), AUTO)
        )
        assert auto.commands == mixed.commands


@pytest.mark.parametrize("rate_per_s", [1.6, 2.5, 3.0])
def test_answers_of_a_few_tokens_are_not_handed_over_to_learn_the_cost(rate_per_s: float) -> None:
    """The wait for the taker's step, shared by so few tokens, is more than a split gains."""
    short = poisson(rate_per_s, 90.0, LogNormal(1200.0, 0.5, 4.0, 0.3), random.Random(1))
    assert not any(isinstance(one, SetRole) for one in simulated(short, AUTO).commands)


def test_a_slow_link_soon_ends_a_split() -> None:
    """The cost of a hand-over is learned from the first ones."""
    slow = msgspec.structs.replace(MACHINE, link=LinkSettings(2e6))
    load = prompts_and_answers(6.0, seconds=90.0)
    mixed, auto = (simulated(load, roles, slow).report for roles in (RoleSettings(), AUTO))
    assert 0 < auto.migrations < auto.requests / 3
    assert auto.attainment is not None
    assert mixed.attainment is not None
    assert auto.attainment > mixed.attainment - 0.1


def test_hand_over_costs_learned_in_a_rush_are_forgotten() -> None:
    """The link was busy then; a steady load later is split all the same."""
    rush, steady = prompts_and_answers(10.0, seconds=20.0), prompts_and_answers(6.0, seed=2, seconds=90.0)
    rows = list(zip(rush.arrival_s, rush.prompt_tokens, rush.output_tokens, strict=True))
    rows += [
        (60.0 + at_s, prompt, output)
        for at_s, prompt, output in zip(steady.arrival_s, steady.prompt_tokens, steady.output_tokens, strict=True)
    ]
    played = simulated(one_by_one(*rows), AUTO)
    handed = {one.request for one in played.commands if isinstance(one, MoveRequest) and one.after_first_token}
    late = {f"r{number}" for number in range(len(rush) + len(steady) // 2, len(rows))}
    assert len(handed & late) > len(late) / 2


def test_a_split_ends_with_its_load() -> None:
    """Roles merge once prompts are few: later requests stay where they are placed."""
    busy, calm = prompts_and_answers(6.0), [(200.0 + 4.0 * number, 1200, 100) for number in range(60)]
    load = one_by_one(*zip(busy.arrival_s, busy.prompt_tokens, busy.output_tokens, strict=True), *calm)
    played = simulated(load, AUTO)
    roles: dict[WorkerId, Role] = {}
    seen = set()
    for command in played.commands:
        if isinstance(command, SetRole):
            assert roles.get(command.worker, Role.MIXED) is not command.role
            roles[command.worker] = command.role
            seen.add(command.role)
        elif isinstance(command, RetireWorker):
            roles.pop(command.worker, None)
    assert (seen, set(roles.values()) - {Role.MIXED}) == (set(Role), set())
    late = {f"r{len(busy) + number}" for number in range(45, 60)}
    assert not [one for one in played.commands if isinstance(one, MoveRequest) and one.request in late]


def test_no_worker_is_woken_and_no_request_waits_for_a_role() -> None:
    """With no decode worker at all, requests decode where their prompts were computed."""
    only = RoleSettings(fixed={WorkerId(f"w{number}"): Role.PREFILL for number in range(4)})
    mixed, fixed = (simulated(prompts_and_answers(6.0, seconds=90.0), roles) for roles in (RoleSettings(), only))
    assert fixed.report.queueing_s.most == 0.0
    assert fixed.report.gpu_seconds <= 1.02 * mixed.report.gpu_seconds
    assert fixed.report.attainment is not None
    assert fixed.report.attainment > 0.8


def test_every_request_ends_though_memory_is_short_and_moves_fail() -> None:
    small = msgspec.structs.replace(MACHINE, capacity_bytes=4 * SMALL.capacity_bytes, gpus=2, failure_rate=0.2)
    report, told, _ = simulated(prompts_and_answers(2.0), FIXED, small)
    assert report.migrations > 100
    assert report.preemptions
    assert report.migrations_aborted
    assert report.refused + len([one for one in told if isinstance(one, RequestFinished)]) == report.requests
