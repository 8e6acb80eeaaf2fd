"""A real daemon's decision log: the auditor finds no fault in it, and its facts reproduce the decisions."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from melld.cli import main
from melld.decisions.stories import Happened, Story, stories_of
from tests.decisions.audit import Auditor
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

STREAMS = 14


class Life(NamedTuple):
    """A daemon that has lived: its log, the request that was to be moved, and what `melld why` said of that one."""

    log: Path
    request: str
    story: bytes


@pytest.fixture(scope="module")
def log(life: Life) -> Path:
    return life.log


@pytest.fixture(scope="module")
def life(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A daemon's whole life: load, moves of the policy's and the operator's, a worker's death, its stop."""
    path = tmp_path_factory.mktemp("decisions") / "decisions.jsonl"
    flags = ["--device", "cpu:3", "--kv-bytes", "4MiB", "--set", 'scheduler.policy="mell-plus"']
    flags += ["--set", f'scheduler.decision_log="{path}"', "--set", "idle.sleep_after_s=0.5"]
    with DaemonProcess(demo_model, *flags, harmable=True) as daemon:
        operator = Operator(daemon.wait_ready())
        body = {"prompt": list(range(5, 105)), "temperature": 0, "ignore_eos": True}
        lengths = [50 + 10 * number for number in range(STREAMS)]
        with slowed(daemon.faults):
            streams = [Stream(daemon, {**body, "max_tokens": tokens, "cache_salt": str(tokens)}) for tokens in lengths]
            streams[-1].wait_chunks(5)
            [last] = operator.requests_of(streams[-1])
            here = last["worker"]
            there = next(worker["worker"] for worker in operator.status()["workers"] if worker["worker"] != here)
            with contextlib.suppress(Exception):
                operator.migrate(last["request"], there, None)
            os.kill(next(one["pid"] for one in operator.status()["workers"] if one["worker"] == here), signal.SIGKILL)
        answers = [stream.result() for stream in streams]
        assert [answer.error for answer in answers] == [None] * STREAMS
        operator.wait_idle()
        operator.wait(lambda status: all("not needed" in one["why"] for one in status["workers"]))
        why = daemon.melld("why", last["request"], "--json")
        assert (why.returncode, why.stderr) == (0, "")
        assert daemon.stop() == 0
    return Life(path, last["request"], why.stdout.encode())


def test_the_auditor_finds_no_fault(log: Path) -> None:
    """Capacity, single ownership, lifecycles: users can check them without trusting us."""
    with log.open("rb") as lines:
        auditor = Auditor().read(lines)
    assert auditor.faults == []
    assert auditor.kinds["arrive"] == auditor.kinds["finish"] == STREAMS
    assert auditor.kinds["place"] > STREAMS, "those of the dead worker were placed again"
    assert min(auditor.kinds[kind] for kind in ("move", "moved", "epoch", "grow", "retire")) > 0


def test_the_auditor_would_notice_an_overfull_worker(log: Path) -> None:
    """An auditor that cannot find faults in such a log proves nothing."""
    with log.open("rb") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "worker":
            record["capacity_bytes"] //= 2
    assert any("holds" in fault for fault in Auditor().read(map(json.dumps, records)).faults)


def test_the_daemon_s_decisions_are_reproduced(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A questionable decision can be reproduced from the log alone, by the command."""
    assert main(["simulate", "--replay", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    decisions = ("place", "queue", "move", "activate", "retire")
    with log.open("rb") as lines:
        kinds = [json.loads(line)["kind"] for line in lines]
    assert (told["policy"], told["difference"]) == ("mell-plus", None)
    assert (told["records"], told["decisions"]) == (len(kinds), sum(kind in decisions for kind in kinds))


def test_the_daemon_and_its_log_tell_the_same_story(life: Life, capsys: pytest.CaptureFixture[str]) -> None:
    """A stream's story is available while the daemon runs, and afterwards."""
    assert main(["why", life.request, "--log", str(life.log), "--json"]) == 0
    story = msgspec.json.decode(capsys.readouterr().out, type=Story)
    assert msgspec.json.decode(life.story, type=Story) == story
    assert (story.lines[0].what, story.lines[-1].what, story.ended) == (Happened.ARRIVED, Happened.FINISHED, True)
    pauses_s = [line.pause_s for line in story.lines if line.what is Happened.RESUMED]
    assert pauses_s, "its worker was killed"
    assert all(pause_s is not None and pause_s > 0 for pause_s in pauses_s)


def test_the_log_records_every_move(life: Life) -> None:
    """Each move that brought a request to where it is, with its cause."""
    with life.log.open("rb") as lines:
        records = [json.loads(line) for line in lines]
    stories = stories_of(records)
    moves = [record for record in records if record["kind"] == "move"]
    assert moves
    for move in moves:
        told = [line for line in stories.story(move["request"]).lines if line.event == move["step"]]
        assert [(line.what, line.worker, line.reason) for line in told if line.what is Happened.MOVE_BEGAN] == [
            (Happened.MOVE_BEGAN, move["destination"], move["cause"])
        ]


def test_another_policy_would_have_decided_differently(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first place where a policy departs from the log is reported, with exit code 1."""
    assert main(["simulate", "--replay", str(log), "--policy", "worst-fit"]) == 1
    assert "the first difference is in step" in capsys.readouterr().out
