"""The boundaries in force: measured, saved, read again where they fit, and never while somebody is there."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from melld.config_text import parse_config
from melld.daemon.boundaries import FILE, boundary_settings, fingerprint_of, segments_between, state_directory
from melld.driver.boundaries import BoundaryKeeper, BoundarySettings, NotMeasured
from melld.engine.fleet.calls import Calls
from melld.engine.wire import messages as wire
from tests.serve.offline_daemon import W0, W1, W2, OfflineDaemon

HERE = {"hardware": "a machine", "model": "m", "melld": "1", "vllm": "2", "settings": "s"}


def keeper(daemon: OfflineDaemon, directory: Path, **changed: Any) -> BoundaryKeeper:
    """One that has read what was saved there."""
    facts = {"file": directory / FILE, "fingerprint": HERE, "epoch_s": 0.1, "share": 0.1, "read": True}
    settings = BoundarySettings(**{**facts, "measure_unasked": True, **changed})
    return BoundaryKeeper(daemon.fleet, daemon.planner, settings, daemon.clock)


Reply = Callable[[Any], wire.UtilityDone]


def figures(ask: Any) -> wire.UtilityDone:
    """What a worker would answer: a step of 10 ms, a tenth of it bearable."""
    if isinstance(ask, wire.MeasureLink):
        return wire.UtilityDone(call=ask.call, result=2e9)
    tokens = 500 if ask.batch == 0 else 40 - ask.batch
    return wire.UtilityDone(call=ask.call, result=10.0 * tokens)


async def measured(daemon: OfflineDaemon, one: BoundaryKeeper, reply: Reply = figures) -> Any:
    """Measure, with workers that answer at once; returns the report or the refusal."""
    loop = asyncio.get_running_loop()

    def send(worker: Any, message: Any, payload: Any = ()) -> None:
        if isinstance(message, wire.MeasurePrefill | wire.MeasureLink):
            loop.call_soon(daemon.fleet.worker_said, daemon.fleet.slots[worker], reply(message), [])

    daemon.fleet.calls = Calls(send)
    try:
        return await one.measure()
    except NotMeasured as error:
        return error


async def test_what_was_measured_is_in_force_and_read_again(tmp_path: Path) -> None:
    """The second start of the daemon knows the machine."""
    daemon = OfflineDaemon()
    one = keeper(daemon, tmp_path)
    assert "not measured" in one.line()
    report = await measured(daemon, one)
    limits = daemon.planner.boundaries
    assert limits.link_bytes(W0, W1) == 200_000_000  # in an epoch of 100 ms
    assert [limits.prefill_tokens(W1, batch) for batch in (0, 1, 4, 16)] == [500, 39, 36, 24]
    again = OfflineDaemon()
    later = keeper(again, tmp_path)
    assert later.report() == report
    assert again.planner.boundaries == limits
    assert later.line() == one.line()


@pytest.mark.parametrize("changed", [{"hardware": "another"}, {"model": "n"}, {"vllm": "3"}])
async def test_figures_of_another_machine_or_model_do_not_count(tmp_path: Path, changed: dict[str, str]) -> None:
    """A directory that moves to another machine brings no wrong figures along."""
    daemon = OfflineDaemon()
    await measured(daemon, keeper(daemon, tmp_path))
    assert keeper(OfflineDaemon(), tmp_path, fingerprint={**HERE, **changed}).profiled is None
    assert keeper(OfflineDaemon(), tmp_path, read=False).profiled is None


@pytest.mark.parametrize("text", ["", "{}", '{"boundaries": {"prefill": {"w0": []}}, "fingerprint": {}, "file": ""}'])
async def test_a_damaged_file_is_passed_over(tmp_path: Path, text: str) -> None:
    """The daemon starts; it knows no more than at its first start."""
    (tmp_path / "boundaries.json").write_text(text)
    assert keeper(OfflineDaemon(), tmp_path).profiled is None


async def test_nothing_is_measured_while_somebody_is_there(tmp_path: Path) -> None:
    """A user's request is not slowed for figures: neither one that runs nor one that comes meanwhile."""
    daemon = OfflineDaemon()
    one = keeper(daemon, tmp_path)

    def wanted(ask: Any) -> wire.UtilityDone:
        late = isinstance(ask, wire.MeasureLink)
        return wire.UtilityDone(call=ask.call, error=wire.WANTED) if late else figures(ask)

    assert isinstance(await measured(daemon, one, wanted), NotMeasured)
    daemon.admit("r0", 4)
    assert isinstance(await measured(daemon, one), NotMeasured)
    assert one.profiled is None
    assert keeper(daemon, tmp_path).profiled is None


async def test_what_one_worker_cannot_tell_is_noted_and_has_the_default(tmp_path: Path) -> None:
    """A small KV cache, or a link that is not there, does not keep the rest from being measured."""
    daemon = OfflineDaemon()

    def partly(ask: Any) -> wire.UtilityDone:
        fails = isinstance(ask, wire.MeasurePrefill) and ask.batch == 16
        return wire.UtilityDone(call=ask.call, error="its KV cache is too small for that") if fails else figures(ask)

    report = await measured(daemon, keeper(daemon, tmp_path), partly)
    assert [batch for batch, _ in report.boundaries.prefill[W0]] == [0, 1, 4]
    assert report.notes == tuple(f"{name}: its KV cache is too small for that" for name in ("w0", "w1", "w2"))


async def test_a_worker_that_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    """The rest is measured: neither a death nor an idle worker's rest ends the daemon."""
    daemon = OfflineDaemon()

    def dies(ask: Any) -> wire.UtilityDone:
        daemon.fleet.ready.pop(W0, None)
        return figures(ask)

    report = await measured(daemon, keeper(daemon, tmp_path), dies)
    assert report.boundaries.links.keys() == {W1, W2}


async def test_machines_that_join_later_are_measured_too(tmp_path: Path) -> None:
    """Else requests would go there by their tokens for as long as the daemon runs."""
    daemon = OfflineDaemon()
    one = keeper(daemon, tmp_path)
    assert one.is_due()
    fleet = daemon.fleet
    joining = fleet.workers.pop(W2), msgspec.structs.replace(fleet.ready.pop(W2), far_kv_handle=b"memory")
    await measured(daemon, one)
    assert not one.is_due()
    fleet.workers[W2], fleet.ready[W2] = joining
    assert one.is_due()
    await measured(daemon, one)
    assert not one.is_due()


async def test_what_links_share_counts_before_it_is_measured(tmp_path: Path) -> None:
    """Four copies at once do not begin at four times what the memory between CPU workers carries."""
    daemon = OfflineDaemon()
    limits = daemon.planner.boundaries
    shared = segments_between(list(daemon.fleet.slots.values()), {}, limits.other_link_bytes)
    keeper(daemon, tmp_path, segments=shared)
    in_force = daemon.planner.boundaries
    assert [segment.name for segment in in_force.segments_of(W0, W1)] == ["host memory"]
    report = await measured(daemon, keeper(daemon, tmp_path, segments=shared))
    assert report.boundaries.segments == ()  # three links at once carried three times as much


async def test_a_policy_that_moves_nobody_needs_no_figures(tmp_path: Path) -> None:
    """The first start measures in the background only what will be used."""
    unasked = {}
    for policy, boundaries in (("most-free", "auto"), ("mell-plus", "saved"), ("mell-plus", "auto")):
        text = (
            f'[scheduler]\npolicy = "{policy}"\n[migration]\nboundaries = "{boundaries}"\n[model]\npath = "{tmp_path}"'
        )
        settings = boundary_settings(parse_config(text, "here"), [], [], {}, {"XDG_RUNTIME_DIR": str(tmp_path)})
        unasked[policy, boundaries] = settings.measure_unasked
    assert unasked == {("most-free", "auto"): False, ("mell-plus", "saved"): False, ("mell-plus", "auto"): True}
    await asyncio.wait_for(keeper(OfflineDaemon(), tmp_path, measure_unasked=False).run(), 5.0)


def test_the_model_counts_by_what_it_is(tmp_path: Path) -> None:
    """The same model in another place has the same figures, another one in the same place has others."""
    texts = []
    for name, text in (("a", "{}"), ("b", "{}"), ("c", '{"layers": 2}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        texts.append(fingerprint_of("here", str(tmp_path / name), {})["model"])
    assert texts[0] == texts[1] != texts[2]


def test_the_file_outlives_the_service(tmp_path: Path) -> None:
    """Under systemd it lies in the state directory: /run is emptied at every boot."""
    assert state_directory({"STATE_DIRECTORY": "/var/lib/melld:/x"}, tmp_path) == Path("/var/lib/melld")
    assert state_directory({}, tmp_path) == tmp_path


async def test_the_report_is_plain_json(tmp_path: Path) -> None:
    """`melld profile --show --json` can be read by a program."""
    report = await measured(daemon := OfflineDaemon(), keeper(daemon, tmp_path))
    plain = msgspec.json.decode(msgspec.json.encode(report))
    assert plain["boundaries"]["links"]["w0"]["w1"] == 200_000_000
    assert plain["fingerprint"] == HERE
