"""Live migration through the HTTP API of a real daemon: a moved answer equals the unmoved one, whatever the call."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from melld.cli import main
from melld.control.client import ControlRefused
from tests.migrate.live import CASES, GREEDY, SEEDED, THOUGHT, Bench, Stream


@pytest.fixture(autouse=True)
def _left_as_it_was(bench: Bench) -> Iterator[None]:
    yield
    bench.operator.wait_idle()


HERE = (("json_schema", "tokens"), ("n", "kv"))
"""In the short form; `tests/engine/worker/residency` moves all that a single worker knows of, both ways."""


@pytest.mark.parametrize(
    ("name", "via"),
    [
        pytest.param(name, via, marks=() if (name, via) in HERE else pytest.mark.long)
        for name in [*CASES, "stop"]
        for via in ("kv", "tokens")
    ],
)
def test_a_moved_answer_is_unchanged(bench: Bench, name: str, via: str) -> None:
    """Text, log-probabilities, finish reason and usage are what they would have been: the client cannot tell."""
    unmoved = bench.unmoved(name)
    with bench.slowed():
        stream = bench.stream(name)
        reports = bench.operator.move(stream, via)
    assert [(report["outcome"], report["via"]) for report in reports] == [("committed", via)] * len(reports)
    assert len(reports) == len(unmoved.choices)
    assert stream.result() == unmoved


@pytest.mark.parametrize("via", ["kv", pytest.param("tokens", marks=pytest.mark.long)])
def test_a_half_prefilled_prompt_moves(bench: Bench, via: str) -> None:
    """A long prompt need not be fully computed for its request to move."""
    body = {"prompt": list(range(5, 245)) * 8, "max_tokens": 100, "temperature": 0}
    unmoved = Stream(bench.daemon, body | {"cache_salt": f"{via} unmoved"}).result()
    with bench.slowed():
        stream, one = bench.seen_prefilling(body, via)
        report = bench.operator.migrate(one["request"], "w1" if one["worker"] == "w0" else "w0", via)
    assert (report["outcome"], stream.result()) == ("committed", unmoved)


def test_a_request_moves_there_and_back_again(bench: Bench) -> None:
    """Moves leave no trace that adds up."""
    with bench.slowed():
        stream = bench.stream("penalties")
        for turn in range(6):
            [report] = bench.operator.move(stream, "tokens" if turn % 3 == 1 else "kv")
            assert report["outcome"] == "committed"
    assert stream.result() == bench.unmoved("penalties")


def test_a_thinking_budget_survives_a_move(bench: Bench) -> None:
    """`thinking_token_budget` counts from the prompt on: a worker that takes over a thought knows what is spent."""
    with bench.slowed():
        stream = bench.stream("thinking")
        reports = [*bench.operator.move(stream, "kv"), *bench.operator.move(stream, "tokens")]
    assert [report["outcome"] for report in reports] == ["committed"] * 2
    assert stream.result() == bench.unmoved("thinking")
    assert THOUGHT[1] in stream.answer.choices[0].text


@pytest.mark.long
def test_a_move_at_any_token_is_invisible(bench: Bench) -> None:
    """No position in an answer is a bad moment."""
    body = {**SEEDED, "max_tokens": 30}
    unmoved = Stream(bench.daemon, body).result()
    for position in range(1, 24):
        with bench.slowed():
            stream = Stream(bench.daemon, body)
            stream.wait_chunks(position)
            bench.operator.move(stream, "kv" if position % 2 else "tokens")
        assert stream.result() == unmoved


@pytest.mark.long
def test_eight_requests_move_at_once(bench: Bench) -> None:
    """A worker is emptied while all its clients read on."""
    bodies = [{**SEEDED, "seed": seed, "max_tokens": 80} for seed in range(8)]
    unmoved = [stream.result() for stream in [Stream(bench.daemon, body) for body in bodies]]
    with bench.slowed():
        streams = [Stream(bench.daemon, body) for body in bodies]
        for stream in streams:
            stream.wait_chunks(5)
        movers = [threading.Thread(target=bench.operator.move, args=(stream, "kv")) for stream in streams]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
    assert [stream.result() for stream in streams] == unmoved


@pytest.mark.long
def test_a_long_prompt_enters_a_busy_worker_slice_by_slice(bench: Bench) -> None:
    """Decoding requests there go on between the slices, and the moved answer is unchanged."""
    body = {"prompt": list(range(5, 245)) * 13, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    unmoved = Stream(bench.daemon, body | {"cache_salt": "at rest"}).result()
    with bench.slowed():
        stream = Stream(bench.daemon, body | {"cache_salt": "paced"})
        stream.wait_chunks(3)
        [one] = bench.operator.requests_of(stream)
        beside = Stream(bench.daemon, {**GREEDY, "max_tokens": 2000})  # the policy spreads: it is on the other worker
        beside.wait_chunks(5)
        [other] = bench.operator.requests_of(beside)
        assert other["worker"] != one["worker"]
        began_s = time.monotonic()
        [report] = bench.operator.move(stream, "tokens")
        ended_s = began_s + report["total_s"]
    beside.leave()
    assert report["outcome"] == "committed"
    assert sum(began_s < arrived_s < ended_s for arrived_s in beside.arrivals_s) >= 10
    assert stream.result() == unmoved


def test_a_client_that_leaves_during_a_move_frees_both_workers(bench: Bench) -> None:
    """A move is no reason for blocks to stay taken."""
    stream = Stream(bench.daemon, {**GREEDY, "max_tokens": 2000})
    stream.wait_chunks(5)
    [one] = bench.operator.requests_of(stream)
    stream.leave()
    with contextlib.suppress(ControlRefused):  # it was gone before it could be asked for
        bench.operator.migrate(one["request"], "w1" if one["worker"] == "w0" else "w0", "kv")
    bench.operator.wait_idle()


def command(bench: Bench, *words: str, where: Path | None = None) -> int:
    return main(["migrate", *words, "--runtime-directory", str(where or bench.daemon.runtime_directory)])


def test_the_command_reports_what_happened(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads rounds, bytes and the gap; a script reads the same as JSON."""
    with bench.slowed():
        stream = Stream(bench.daemon, GREEDY)
        stream.wait_chunks(5)
        [one] = bench.operator.requests_of(stream)
        there = "w1" if one["worker"] == "w0" else "w0"
        assert command(bench, one["request"], there, "--via", "kv", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["outcome"], report["destination"]) == ("committed", there)
        assert min(report["rounds"], report["blocks"], report["copied_bytes"], report["copy_s"], report["gap_s"]) > 0
        part_of_its_name = one["request"][4:-4]
        assert command(bench, part_of_its_name, one["worker"]) == 0
        assert "ms between two tokens" in capsys.readouterr().out
        assert command(bench, part_of_its_name, one["worker"]) == 0
        assert f"is already on {one['worker']}" in capsys.readouterr().out
        [one] = bench.operator.requests_of(stream)
        assert one["pinned"]
        assert command(bench, one["request"], "w9") == 1
        assert "no worker 'w9'; available: w0, w1" in capsys.readouterr().err
    stream.result()


def test_the_command_reports_what_did_not_happen(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit codes tell a refusal from bad usage and from a missing daemon."""
    assert command(bench, "nobody", "w0") == 1
    assert "no request" in capsys.readouterr().err
    assert command(bench, "nobody", "w0", "--via", "pigeon") == 2
    assert command(bench, "nobody", "w0", where=tmp_path) == 3


def test_moves_are_counted(bench: Bench) -> None:
    """Metrics show what moved, how, and how long clients waited."""
    metrics = bench.daemon.get("/metrics")
    assert 'melld_migrations_total{outcome="committed",via="kv"}' in metrics
    assert "melld_migration_gap_seconds_bucket" in metrics
