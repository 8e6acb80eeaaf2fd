"""Overload: a short queue, quick refusals with a time to retry, and no client kept out by another."""

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
    """Return a prompt of so many tokens, different from the others from the start, so that nothing of it is cached."""
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
    """Return how many requests were shed, by cause."""
    metrics = request(crowded.daemon.url, "GET", "/metrics", headers={"Authorization": f"Bearer {FIRST}"}).body.decode()
    return dict(re.findall(r'\nmelld_requests_sent_away_total\{cause="([^"]*)",model="[^"]*"\} (.*)', metrics))


class Standstill:
    """A stream that has begun fills the worker, which stays stopped as long as needed (less than counts as hung)."""

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
    """Queue them one after the other."""
    readers = []
    for one in bodies:
        readers.append(crowded.read(one, FIRST))
        waiting(crowded, len(readers))
    return readers


def waiting(crowded: Subject, count: int) -> None:
    """Wait until so many are in the queue."""
    crowded.until(lambda status: status["queued_requests"] == count)


def test_clients_beyond_the_queue_get_a_retry_time(crowded: Subject) -> None:
    """Without memory requests wait; beyond the queue's limit one more is refused at once, with a time."""
    with Standstill(crowded) as first:
        queued = line_up(crowded, BODIES[:QUEUED])
        malformed = BODIES[0] | {"temperature": -1}  # nothing but the priority is judged before the line
        refused = [crowded.read(one, FIRST).wait_end() for one in (*BODIES[QUEUED:], malformed)]
    assert [reader.ends for reader in refused] == [[FULL]] * len(refused)
    assert all(1 <= int(reader.headers["retry-after"]) <= 60 for reader in refused)
    assert crowded.judge([first, *queued, *refused], [FULL, LATE]) == []
    assert all(reader.ended_s < queued[0].ended_s for reader in refused), "at once: while the first still waited"
    assert queued[0].ends == ["length"]


def test_the_queue_deadline_ends_only_requests_that_have_not_begun(crowded: Subject) -> None:
    """503, or an event in a stream without a token; no answer is cut short."""
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


def test_a_waiting_stream_sends_keep_alives(crowded: Subject) -> None:
    """Proxies cut what is silent for a minute: the head comes soon, then comments, even between two tokens."""
    with Standstill(crowded) as first:
        said = first.comments
        waits = crowded.read(BODIES[0], FIRST).wait_end()
    assert waits.status == 200
    assert waits.comments >= DEADLINE_S - 3, "one a second since the head came"
    assert first.comments - said >= DEADLINE_S - 3
    assert crowded.judge([first, waits], [LATE]) == []


def test_urgent_requests_go_first_and_the_least_urgent_are_shed(crowded: Subject) -> None:
    """`priority` as in vLLM: lower goes first; a full queue sheds the last of the least urgent."""
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


def test_a_client_that_leaves_the_queue_is_forgotten_at_once(crowded: Subject) -> None:
    """Nothing is computed for a client that left before its turn."""
    before = sent_away(crowded)
    with Standstill(crowded) as first:
        [gone] = line_up(crowded, BODIES[:1])
        gone.leave()
        crowded.until(lambda status: not status["queued_requests"])
    first.leave()
    crowded.until(lambda status: not status["requests"] and not held(status))
    assert sent_away(crowded) == before, "it had left before it was told that it waited too long"


def test_one_key_cannot_fill_the_queue_or_starve_another(crowded: Subject) -> None:
    """A client that asks for everything makes room for another, who is served next."""
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


def test_no_key_can_jump_the_queue(crowded: Subject) -> None:
    """With several keys a priority below zero is for the operator to allow."""
    answer = request(
        crowded.daemon.url, "POST", "/v1/chat/completions", chat(priority=-1), {"Authorization": f"Bearer {FIRST}"}
    )
    assert (answer.status, answer.json()["error"]["param"]) == (400, "priority")


def test_shed_requests_are_counted_and_logged_once_in_a_while(crowded: Subject) -> None:
    """The metrics and one line of the log tell an operator that there was too little room, and why."""
    assert float(sent_away(crowded)["queue full"]) >= 3
    crowded.daemon.wait_for("requests; last reason: queue full")


def test_a_worker_that_cannot_load_backs_off_and_says_why(crowded: Subject) -> None:
    """Damaged weights: the status names the reason and the next start, and once they are fixed all is well."""
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
