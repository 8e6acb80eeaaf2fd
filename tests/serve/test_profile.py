"""`melld profile` on a real daemon: real copies and real steps, and users first."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from melld.cli import main
from tests.audio_model import make_hearing_model
from tests.families.every import FAMILIES
from tests.listening_model import make_listening_model
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess


def test_a_daemon_measures_what_moves_may_cost(daemon: DaemonProcess) -> None:
    """Not while somebody is served; then the figures of every link and worker are there, and the status tells them."""
    stream = Stream(daemon, {"prompt": "Once upon a time", "max_tokens": 30_000, "ignore_eos": True})
    stream.wait_chunks(2)
    refused = daemon.melld("profile")
    assert (refused.returncode, "requests are running" in refused.stderr) == (1, True)
    stream.leave()
    Operator(daemon).wait_idle()
    done = daemon.melld("profile", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["notes"] == []
    assert report["took_s"] < 60
    links, prefill = report["boundaries"]["links"], report["boundaries"]["prefill"]
    assert {(source, target) for source, row in links.items() for target in row} == {("w0", "w1"), ("w1", "w0")}
    assert all(count > 1 << 20 for row in links.values() for count in row.values())  # in 100 ms, from memory to memory
    for table in prefill.values():
        assert [batch for batch, _ in table] == [0, 1, 4, 16]
        tokens = [count for _, count in table]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[-1] >= 1
    assert json.loads(daemon.melld("profile", "--show", "--json").stdout) == report
    assert daemon.status()["boundaries"].startswith("measured ")
    assert "tokens computed for moves" in daemon.melld("profile", "--show").stdout.lower()
    status = daemon.status()
    assert [worker["used_blocks"] for worker in status["workers"]] == [0, 0]


@pytest.mark.long
def test_a_slow_link_is_measured_as_slow(demo_model: Path) -> None:
    """Copies are as large as the link is fast: else nobody would know that a slow one is slower than computing."""
    limit = ("--device", "cpu:2", "--set", 'migration.link_bytes_per_s="512KiB"')
    with DaemonProcess(demo_model, *limit, "--set", "idle.sleep_after_s=inf") as slow:
        slow.wait_ready()
        Operator(slow).wait_ready()
        Operator(slow).wait_linked(slow)
        report = json.loads(slow.melld("profile", "--json").stdout)
    assert report["notes"] == []
    rates = [
        count / report["boundaries"]["epoch_s"]
        for row in report["boundaries"]["links"].values()
        for count in row.values()
    ]
    assert len(rates) == 2
    assert all(256 << 10 < rate < 1 << 20 for rate in rates), rates


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hearing", "listening", "qwen3_vl", "gemma4_vision", "granite4_h", "deepseek_v3"])
def test_a_model_of_any_kind_outlives_its_measurement(
    kind: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The first quiet moment ends no worker, whatever the model reads and keeps."""
    makers = {"hearing": make_hearing_model, "listening": make_listening_model}
    model = tmp_path / kind if kind in makers else model_of(kind)
    if kind in makers:
        makers[kind](model)
    options = FAMILIES[kind].options if kind in FAMILIES else {}
    flags = [word for name, value in options.items() for word in ("--set", f"model.vllm.{name}={json.dumps(value)}")]
    with DaemonProcess(model, "--device", "cpu:2", "--set", "idle.sleep_after_s=inf", *flags) as process:
        before = process.wait_ready().status()["workers"]
        done = process.melld("profile", "--json")
        assert done.returncode == 0, done.stderr
        assert [worker["pid"] for worker in process.status()["workers"]] == [worker["pid"] for worker in before]
        assert json.loads(done.stdout)["boundaries"]["prefill"], done.stdout


def test_without_a_daemon_there_is_nothing_to_measure(tmp_path: object) -> None:
    """A script tells "nobody is there" (3) from "not now" (1)."""
    assert main(["profile", "--runtime-directory", str(tmp_path)]) == 3
