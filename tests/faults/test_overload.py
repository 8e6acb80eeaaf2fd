"""More work than there is room for: a short line, quick refusals that name a time, and nobody kept out by another."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.http_client import COMPLETIONS, chat, request
from tests.faults.checker import Subject, held
from tests.faults.conftest import DEADLINE_S, KEYS, QUEUED
from tests.faults.reader import Reader
from tests.worker_faults import slowed

FIRST, SECOND = KEYS
FULL, LATE = "status 429 queue_full", "error waited_too_long"
# Of one that has waited in the line for longer than a second its client has the head of a stream.
DISPLACED = (FULL, "error queue_full")


def body(tokens: int, prompt: int, number: int = 0) -> dict[str, Any]:
    """A prompt of so many tokens, different from the others' at its beginning, so that nothing of it is cached."""
    words = [5 + number] + [5 + place * 7 % 200 for place in range(prompt - 1)]
    return {"prompt": words, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


# 31 blocks of 32 tokens, of which each needs 16: while the tall one runs none of the others has room.
TALL = body(12, 500, 99)
BODIES = [body(5, 500, number) for number in range(QUEUED + 3)]


@pytest.fixture(autouse=True)
def _empty(crowded: Subject) -> Iterator[None]:
    """Each test begins and ends with an idle worker."""
    crowded.key = FIRST
    for one in (TALL, *BODIES):
        crowded.unharmed(one)
    assert crowded.judge_quiet() == []
    yield
    assert crowded.judge_quiet() == []


def sent_away(crowded: Subject) -> dict[str, str]:
    """How many requests were sent away, by the cause."""
    metrics = request(crowded.daemon.url, "GET", "/metrics", headers={"Authorization": f"Bearer {FIRST}"}).body.decode()
    return dict(re.findall(r'\nmelld_requests_sent_away_total\{cause="([^"]*)",model="[^"]*"\} (.*)', metrics))


class Standstill:
    """One stream has begun and fills the worker, which is stopped for as long as the test wants (less than is hung)."""

    def __init__(self, crowded: Subject) -> None:
        self.pid = int(crowded.worker("w0")["pid"])
        with slowed(crowded.faults):
            self.first = crowded.read(TALL, FIRST)
            self.first.wait_chunks(1)
            os.kill(self.pid, signal.SIGSTOP)

    def __enter__(self) -> Reader:
        return self.first

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGCONT)


def line_up(crowded: Subject, bodies: list[dict[str, Any]]) -> list[Reader]:
    """They come one after the other, and wait."""
    readers = []
    for one in bodies:
        readers.append(crowded.read(one, FIRST))
        waiting(crowded, len(readers))
    return readers


def waiting(crowded: Subject, count: int) -> None:
    """Until so many wait."""
    crowded.until(lambda status: status["queued_requests"] == count)


def test_beyond_the_line_clients_are_told_when_to_come_again(crowded: Subject) -> None:
    """When no memory is left requests wait; when too many wait, one more is refused at once, with a time."""
    with Standstill(crowded) as first:
        queued = line_up(crowded, BODIES[:QUEUED])
        malformed = BODIES[0] | {"temperature": -1}  # nothing but the priority is judged before the line
        refused = [crowded.read(one, FIRST).wait_end() for one in (*BODIES[QUEUED:], malformed)]
    assert [reader.ends for reader in refused] == [[FULL]] * len(refused)
    assert all(1 <= int(reader.headers["retry-after"]) <= 60 for reader in refused)
    assert crowded.judge([first, *queued, *refused], [FULL, LATE]) == []
    assert all(reader.ended_s < queued[0].ended_s for reader in refused), "at once: while the first still waited"
    assert queued[0].ends == ["length"]


def test_who_waits_too_long_is_told_and_who_has_begun_is_not_ended(crowded: Subject) -> None:
    """A deadline is for those that wait: 503, or an event in a stream without a token; no answer is cut short."""
    whole = {"model": "demo", **BODIES[1]}
    with Standstill(crowded) as first:
        late = crowded.read(BODIES[0], FIRST)
        refused = request(crowded.daemon.url, "POST", COMPLETIONS, whole, {"Authorization": f"Bearer {FIRST}"})
        late.wait_end()
    assert (refused.status, refused.json()["error"]["code"]) == (503, "waited_too_long")
    assert int(refused.headers["retry-after"]) >= 1
    assert late.ends == [LATE]
    assert late.ended_s - late.asked_s >= DEADLINE_S
    assert crowded.judge([first, late], [LATE]) == []
    assert first.ends == ["length"]


def test_a_stream_that_waits_shows_that_it_lives(crowded: Subject) -> None:
    """Proxies cut what is silent for a minute: the head comes soon, then comments, also between two tokens."""
    with Standstill(crowded) as first:
        said = first.comments
        waits = crowded.read(BODIES[0], FIRST).wait_end()
    assert waits.status == 200
    assert waits.comments >= DEADLINE_S - 3, "one a second since the head came"
    assert first.comments - said >= DEADLINE_S - 3
    assert crowded.judge([first, waits], [LATE]) == []


def test_the_urgent_go_first_and_the_least_urgent_make_room(crowded: Subject) -> None:
    """`priority` as vLLM has it: lower goes first; in a full line the last of the least urgent gives its place up."""
    standstill = Standstill(crowded)
    with slowed(crowded.faults):  # so that their readers see who was first
        with standstill as first:
            later = line_up(crowded, [one | {"priority": 5} for one in BODIES[:QUEUED]])
            urgent = crowded.read(BODIES[QUEUED], FIRST)
            assert later[-1].wait_end().ends[0] in DISPLACED
        for reader in (urgent, *later):
            reader.wait_end()
    assert crowded.judge([first, urgent, *later], [*DISPLACED, LATE]) == []
    assert urgent.ends == ["length"]
    assert all(urgent.first_s < reader.first_s for reader in later if reader.first_s)


def test_a_client_that_leaves_the_line_is_forgotten_at_once(crowded: Subject) -> None:
    """Nobody computes for who has gone before its turn."""
    before = sent_away(crowded)
    with Standstill(crowded) as first:
        [gone] = line_up(crowded, BODIES[:1])
        gone.leave()
        crowded.until(lambda status: not status["queued_requests"])
    first.leave()
    crowded.until(lambda status: not status["requests"] and not held(status))
    assert sent_away(crowded) == before, "it had left before it was told that it waited too long"


def test_one_key_cannot_fill_the_line_nor_keep_the_other_waiting(crowded: Subject) -> None:
    """A client that asks for all there is makes room for another, who is served next."""
    standstill = Standstill(crowded)
    with slowed(crowded.faults):
        with standstill as first:
            greedy = line_up(crowded, BODIES[:QUEUED])
            modest = crowded.read(BODIES[QUEUED], SECOND)
            assert greedy[-1].wait_end().ends[0] in DISPLACED
        for reader in (modest, *greedy):
            reader.wait_end()
    assert crowded.judge([first, modest, *greedy], [*DISPLACED, LATE]) == []
    assert modest.ends == ["length"]
    assert all(modest.first_s < reader.first_s for reader in greedy if reader.first_s)


def test_nobody_pushes_in_before_the_other_key(crowded: Subject) -> None:
    """With several keys a priority below zero is for the operator to allow."""
    answer = request(
        crowded.daemon.url, "POST", "/v1/chat/completions", chat(priority=-1), {"Authorization": f"Bearer {FIRST}"}
    )
    assert (answer.status, answer.json()["error"]["param"]) == (400, "priority")


def test_what_was_sent_away_is_counted_and_told_once_in_a_while(crowded: Subject) -> None:
    """An operator sees in the metrics and in one line of the log that there was too little room, and why."""
    assert float(sent_away(crowded)["queue full"]) >= 3
    crowded.daemon.wait_for("requests; last reason: queue full")


def test_a_worker_that_cannot_load_is_tried_later_and_later_and_says_why(crowded: Subject) -> None:
    """Damaged weights: the status names the reason and the next start, and once they are mended all is well."""
    weights = crowded.model / "model.safetensors"
    sound = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(b"no weights")
    try:
        os.kill(crowded.worker("w0")["pid"], signal.SIGKILL)
        told = re.compile("Error.*; restarts in [0-9]+ s")
        crowded.until(lambda status: told.search(status["workers"][0]["reason"]))
    finally:
        weights.write_bytes(sound)
    reasons: list[str] = []

    def is_ready(status: Any) -> bool:
        reasons.append(status["workers"][0]["reason"])
        return bool(status["workers"][0]["state"] == "ready")

    crowded.until(is_ready)
    assert not any("device" in reason for reason in reasons), "what was read of the process before is over with it"
    waited = crowded.read(BODIES[0], FIRST)
    assert crowded.judge([waited], [LATE]) == []
    assert crowded.worker("w0")["reason"] == ""
