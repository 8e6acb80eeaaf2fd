"""Workers that die or hang while their requests run: the clients' streams go on, token for token."""

import contextlib
import http.client
import json
import os
import signal
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.migrate.live import CASES, GREEDY, SEEDED, Bench, Stream
from tests.migrate.matrix import FEW, FEWEST, Loss, suffer
from tests.patience import PATIENCE_S
from tests.worker_faults import SIGNALS

pytestmark = pytest.mark.usefixtures("left_as_it_was")


def gather(bench: Bench, streams: list[Stream], worker: str) -> None:
    """Move all of them to one worker."""
    for stream in streams:
        for one in bench.operator.requests_of(stream):
            if one["worker"] != worker:
                bench.operator.migrate(one["request"], worker, None)


def pid_of(bench: Bench, worker: str) -> int:
    return next(int(one["pid"]) for one in bench.operator.status()["workers"] if one["worker"] == worker)


HERE = ("json_schema", "n", "logprobs", "stop")
"""In the short form; `tests/engine/worker/residency` resumes each of the others from its tokens, too."""


@pytest.mark.parametrize(
    "names", [pytest.param(HERE, id="some"), pytest.param((*CASES, "stop"), id="all", marks=pytest.mark.long)]
)
def test_a_killed_worker_s_answers_are_unchanged(bench: Bench, names: tuple[str, ...]) -> None:
    """kill -9 in mid-answer, whatever was asked for: text, logprobs, finish reason and usage do not show it."""
    bench.learn(names)
    unmoved = [bench.unmoved(name) for name in names]
    with bench.slowed():
        streams = [Stream(bench.daemon, bench.body(name)) for name in names]
        for stream in streams:
            stream.wait_chunks(5)
        gather(bench, streams, "w0")
        os.kill(pid_of(bench, "w0"), signal.SIGKILL)
    answers = [stream.result() for stream in streams]
    assert dict(zip(names, answers, strict=True)) == dict(zip(names, unmoved, strict=True))


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=() if loss in FEWEST else pytest.mark.long, id=loss.name) for loss in FEW],
)
def test_a_worker_lost_during_a_move_costs_no_token(bench: Bench, loss: Loss) -> None:
    """Killed or hung at a step of a move that was seen to reach it: one owner, the same answer, no block held."""
    assert suffer(bench, loss) == []


def ask(bench: Bench, body: dict[str, Any], answers: list[tuple[int, str | None]]) -> None:
    """Make a non-streaming call; return its status, and whether it should be retried."""
    address = urlsplit(bench.daemon.url).netloc
    with contextlib.closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": "demo", **body}), head)
        with connection.getresponse() as response:
            answers.append((response.status, response.getheader("x-should-retry")))


def lose_two_workers(bench: Bench, name: str) -> list[tuple[int, str | None]]:
    """End a request's worker by this signal, and the next as soon as it resumes there; return what its client gets.

    A request that shares a worker with it must go on.
    """
    answers: list[tuple[int, str | None]] = []
    asking = threading.Thread(target=ask, args=(bench, {**GREEDY, "max_tokens": 200}, answers))
    bench.unmoved("long")
    with bench.slowed():
        bystander = bench.stream("long")
        [one] = bench.operator.requests_of(bystander)
        home, other = one["worker"], "w1" if one["worker"] == "w0" else "w0"
        asking.start()
        its = bench.operator.wait_request(lambda found: found["request"] != one["request"] and found["output_tokens"])
        if its["worker"] == home:
            while bench.operator.migrate(one["request"], other, None)["outcome"] != "committed":
                continue
            home, other = other, home
        fault = bench.faults / f"{home}.resumed.{name}"
        fault.touch()
        os.kill(pid_of(bench, other), SIGNALS[name])
    asking.join(PATIENCE_S)
    assert not fault.exists()
    assert bystander.result() == bench.unmoved("long")
    return answers


def test_a_request_that_kills_two_workers_fails_alone(bench: Bench) -> None:
    """It gets a 500 that tells clients not to retry; a request that shared its workers continues."""
    assert lose_two_workers(bench, "ABRT") == [(500, "false")]


@pytest.mark.long  # its short forms: blame in fleet/test_request.py and host/test_fate.py
def test_a_request_whose_workers_are_killed_from_outside_continues(bench: Bench) -> None:
    """kill -9, twice in a row, under the same request: it is not to blame."""
    assert lose_two_workers(bench, "KILL") == [(200, None)]


def test_a_request_without_a_worker_waits_for_one(bench: Bench) -> None:
    """Both workers die: the stream pauses until one is back, and then goes on."""
    body = {**SEEDED, "seed": 77}
    unmoved = Stream(bench.daemon, body).result()
    with bench.slowed():
        stream = Stream(bench.daemon, body)
        stream.wait_chunks(10)
        for worker in ("w0", "w1"):
            os.kill(pid_of(bench, worker), signal.SIGKILL)
    assert stream.result() == unmoved
