"""Several simulated machines: KV stays within one, and a lost one's requests go on elsewhere."""

import json
import re

import msgspec
import pytest

from melld.cli import main
from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.simulator.measures import Report
from tests.simulator.setups import TWO_MACHINES, small_load
from tests.simulator.test_links import KV, SIZE
from tests.simulator.test_simulation import Script, activate, move, one_by_one, place, play, retire, simulate

WHOLE = msgspec.structs.replace(TWO_MACHINES, machine_lost_at_s=None)


@pytest.mark.parametrize(("kv_between_machines", "ways"), [(False, ["kv", "tokens"]), (True, ["kv", "kv"])])
def test_between_machines_a_request_moves_by_its_tokens(kv_between_machines: bool, ways: list[str]) -> None:
    """Even where all else goes by KV: there is no other way, unless the machines are linked."""
    link = msgspec.structs.replace(KV, ways=(Via.KV,), kv_between_machines=kv_between_machines)
    settings = msgspec.structs.replace(WHOLE, link=link, gpus=4, gpus_per_machine=2, wake_s=0.0)
    workers = ["w0", "w1", "w2"]
    script = Script(
        (events.RequestArrived, 0.0, [*map(activate, workers), place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w0")]),
        (events.EpochStarted, 0.5, [move("r0", "w0", "w1", SIZE), move("r1", "w0", "w2", SIZE)]),
        (events.EpochStarted, 60.0, [*map(retire, workers)]),
    )
    measures = play(settings, one_by_one((0.1, 255, 700), (0.1, 255, 700)), script)
    committed = {event.request: event.via for event in script.heard_of(events.MoveCommitted)}  # type: ignore[union-attr]
    assert [committed[name] for name in ("r0", "r1")] == ways
    assert measures.counts.migrations_between_machines == 1


@pytest.mark.parametrize("policy", ["mell-slo", "mell-plus", "best-fit"])
def test_no_request_of_a_lost_machine_is_lost(policy: str) -> None:
    """All that ran there resume from their tokens, on the remaining workers, and every request ends."""
    load = small_load(seconds=60.0)
    report, whole = simulate(policy, TWO_MACHINES, load), simulate(policy, WHOLE, load)
    assert report.displaced > 0 == whole.displaced
    assert report.refused == whole.refused == 0
    assert report.end_s > TWO_MACHINES.machine_lost_at_s
    assert 0.0 < report.displaced_s.p50 < 30.0


SIMULATE = ["simulate", "--poisson", "3", "--lengths", "lognormal", "--length-factor", "4", "--seconds", "25"]
LINKED = ["--gpus", "8", "--link-rate", "1GiB", "--machines", "4"]


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> Report:
    """Return the report of a run with these flags."""
    assert main([*SIMULATE, "--policy", "mell-plus", "--json", *flags]) == 0
    return msgspec.convert(json.loads(capsys.readouterr().out)["policies"][0], Report)


def test_machines_are_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """With a link between them KV crosses; without, only moves within one are copied."""
    apart = told(capsys, *LINKED)
    assert 0 < apart.migrations_kv <= apart.migrations - apart.migrations_between_machines
    linked = told(capsys, *LINKED, "--machine-link-rate", "1GiB")
    assert linked.migrations_kv > linked.migrations - linked.migrations_between_machines
    assert main([*SIMULATE, *LINKED, "--lose-machine-s", "20", "--policy", "mell-plus"]) == 0
    displaced = re.search(r"requests of the lost machine +(\d+)", capsys.readouterr().out)
    assert displaced is not None
    assert int(displaced[1]) > 0


@pytest.mark.parametrize(
    "flags",
    [
        "--machines 2",
        "--machines 3 --gpus 8 --link-rate 1GiB",
        "--machines 2 --gpus 8",
        "--machines 2 --link-rate 1GiB",
        "--machine-link-rate 1GiB --link-rate 1GiB",
        "--lose-machine-s 3",
        "--lose-machine-s 3 --machines 1 --gpus 8 --link-rate 1GiB",
    ],
)
def test_flags_that_make_no_machines_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what is missing."""
    assert main([*SIMULATE, *flags.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
