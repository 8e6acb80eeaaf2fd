"""Requests handed over after their first token, on real workers: answers are the unmoved ones."""

import os
import signal
import threading
from typing import Any

import pytest

from tests.migrate.live import CASES, CHUNK_S, GREEDY, LONG, Answer, Bench, Stream
from tests.migrate.matrix import FEW_HAND_OVERS, HAND_OVERS, Loss, suffer
from tests.worker_faults import slowed

PROMPT = {"prompt": list(range(5, 245)) * 8, "max_tokens": 100, "temperature": 0, "stream": False}


pytestmark = pytest.mark.usefixtures("left_as_it_was")


def body_of(bench: Bench, name: str) -> dict[str, Any]:
    """Return the case, with a prompt of several chunks."""
    match name:
        case "prompt_logprobs":
            return {**PROMPT, "prompt_logprobs": 2}
        case "echoed logprobs":
            return {**PROMPT, "echo": True, "logprobs": 2}
        case "stop":
            text = bench.unmoved("long prompt").choices[0].text
            return bench.body("long prompt") | {"stop": [text[int(len(text) * 0.8) :][:6]]}
    return {**CASES[name], "messages": LONG}


def there(one: Any) -> str:
    """Return the worker that the request is not on."""
    return "w1" if one["worker"] == "w0" else "w0"


def handed_over(bench: Bench, body: dict[str, Any], salt: str) -> tuple[Answer, list[Any]]:
    """Hand over every request of a run during its prefill; return its answer, and the reports."""
    reports: list[Any] = []

    def hand_over(one: Any) -> None:
        reports.append(bench.operator.migrate(one["request"], there(one), None, after_first_token=True))

    with slowed(bench.faults, CHUNK_S):
        stream, first = bench.seen_prefilling(body, salt)
        rows = bench.operator.status()["requests"]
        its = [one for one in rows if one["request"].split("_")[-1] == first["request"].split("_")[-1]]
        movers = [threading.Thread(target=hand_over, args=(one,)) for one in its]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
    assert len(reports) == body.get("n", 1)
    return stream.result(), reports


def words(report: Any) -> list[str]:
    """Return the report's story without its times."""
    return [line.split(" ms ", 1)[1] for line in report["story"]]


def check_followed(report: Any) -> None:
    """Check that the report is of a prompt that was followed, and frozen between its first token and the next."""
    story = words(report)
    assert story[-4:] == ["first token awaited", "frozen", "attached", "released"], report["story"]
    assert not {"copied", "has little left to do"} & set(story), report["story"]


HERE = ("json_schema",)
"""In the short form."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in HERE else pytest.mark.long)
        for name in [*CASES, "stop", "prompt_logprobs", "echoed logprobs"]
    ],
)
def test_a_hand_over_after_the_first_token_leaves_the_answer_unchanged(bench: Bench, name: str) -> None:
    """Text, log-probabilities, also the prompt's, finish reason and usage: the client cannot tell."""
    body = body_of(bench, name)
    unmoved = Stream(bench.daemon, body | {"cache_salt": f"{name} unmoved"}).result()
    answer, reports = handed_over(bench, body, name)
    assert [report["outcome"] for report in reports] == ["committed"] * len(reports)
    assert answer == unmoved
    if len(reports) == 1:  # several are slowed together, and may be past their prompts before their blocks are copied
        check_followed(reports[0])


@pytest.mark.long
def test_a_prompt_of_one_chunk_is_followed_while_it_waits(bench: Bench) -> None:
    """It is queued behind another's chunks, has nothing to copy, and is handed over with all its blocks.

    Where a busy machine hears of its first token late, it decodes on and moves like any other: then once more.
    """
    unmoved = bench.unmoved("greedy")
    body = PROMPT | {"prompt": list(range(5, 245)) * 13, "max_tokens": 1}
    for attempt in range(10):
        with slowed(bench.faults, CHUNK_S):
            before = [bench.seen_prefilling(body, f"before {attempt} {place}")[0] for place in range(2)]
            stream = Stream(bench.daemon, GREEDY | {"cache_salt": f"behind {attempt}"})
            one = bench.operator.wait_request(lambda found: found["prompt_tokens"] < 500 and found["worker"])
            report = bench.operator.migrate(one["request"], there(one), None, after_first_token=True)
        assert report["outcome"] == "committed"
        assert stream.result() == unmoved
        for other in before:
            other.result()
        if "copied" not in words(report):
            break
    assert report["rounds"] == 1
    check_followed(report)


def test_a_hand_over_of_a_decoding_request_is_an_ordinary_move(bench: Bench) -> None:
    """The call came too late for a hand-over after the first token."""
    with bench.slowed():
        stream = bench.stream("greedy")
        [one] = bench.operator.requests_of(stream)
        report = bench.operator.migrate(one["request"], there(one), None, after_first_token=True)
    assert words(report)[-4:] == ["has little left to do", "frozen", "attached", "released"]
    assert stream.result() == bench.unmoved("greedy")


def test_a_first_token_that_is_the_last_cancels_the_move(bench: Bench) -> None:
    """There is nothing left to hand over."""
    body = bench.body("long prompt") | {"max_tokens": 1}
    unmoved = Stream(bench.daemon, body).result()
    answer, [report] = handed_over(bench, body, "one token")
    assert (report["outcome"], answer) == ("request ended", unmoved)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=() if loss in FEW_HAND_OVERS else pytest.mark.long, id=loss.name) for loss in HAND_OVERS],
)
def test_a_worker_lost_during_a_hand_over_costs_no_token(bench: Bench, loss: Loss) -> None:
    """Killed or hung at a step that was seen to be reached: one owner, the same answer, no block held."""
    assert suffer(bench, loss) == []


@pytest.mark.long  # its short form: a loss of `FEW_HAND_OVERS`
@pytest.mark.parametrize("role", ["source", "destination"])
def test_a_worker_killed_while_a_prompt_is_followed_costs_no_token(bench: Bench, role: str) -> None:
    """In that very state: the source computes on, or the prompt is recomputed where the destination was."""
    unmoved = bench.unmoved("long prompt")
    reports: list[Any] = []
    with slowed(bench.faults, 2 * CHUNK_S):
        stream, one = bench.seen_prefilling(bench.body("long prompt"), role)
        victim = one["worker"] if role == "source" else there(one)
        pids = {worker["worker"]: int(worker["pid"]) for worker in bench.operator.status()["workers"]}
        way = one["request"], there(one), None
        mover = threading.Thread(target=lambda: reports.append(bench.operator.migrate(*way, after_first_token=True)))
        mover.start()
        bench.operator.wait_request(lambda found: found["moving_step"] == "following")
        os.kill(pids[victim], signal.SIGKILL)
        mover.join()
    assert f"{role} died" in words(reports[0])
    assert reports[0]["outcome"] != "committed"
    assert stream.result() == unmoved
