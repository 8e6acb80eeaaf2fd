"""A daemon with a model that keeps states: moved, handed over or killed, requests answer as if nothing happened."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.migrate.live import CASES, CHUNK_S, THINKS, Bench, Stream, alike, linked_workers
from tests.patience import PATIENCE_S
from tests.worker_faults import slowed

FLAGS = (*THINKS, "--kv-bytes", "64MiB", "--set", "health.steady_after_s=0")
FLAGS += ("--set", "model.vllm.max_num_batched_tokens=512")  # a prompt of 3,000 tokens takes six steps
SPLIT = ("--set", 'scheduler.policy="mell-slo"', "--role", "w0=prefill", "--role", "w1=decode")
SPLIT += ("--set", "targets.itl_ms=1000")  # slowed, one worker is to have room for all
ROUNDING = 1e-4
"""Log-probabilities of what is computed again: a prompt's states are other sums than those of single tokens."""
pytestmark = pytest.mark.long  # its short form, on two workers alone: `tests/engine/worker/residency/test_states.py`


@pytest.fixture(scope="module", params=["granite4_h_micro", "qwen3_5"])
def model(model_of: Callable[[str], Path], request: Any) -> Path:
    """Three layers of Mamba 2 and one of attention, or six of gated delta nets and two."""
    return model_of(request.param)


@pytest.fixture(scope="module")
def bench(model: Path) -> Iterator[Bench]:
    """Two workers."""
    with linked_workers(model, *FLAGS) as process:
        yield Bench(process, process.faults)


@pytest.fixture
def split(model: Path) -> Iterator[Bench]:
    """Two others, both in service: w0 computes the prompts, w1 decodes.  One that has died only wakes under load."""
    with linked_workers(model, *FLAGS, *SPLIT) as process:
        split = Bench(process, process.faults)
        with split.slowed():
            stream = split.stream("greedy")
            split.operator.move(stream, None)  # which puts the other one into service
        stream.result()
        yield split


@pytest.fixture(autouse=True)
def _left_as_it_was(bench: Bench) -> Iterator[None]:
    yield
    bench.operator.wait_ready()
    bench.operator.wait_idle()


def check(stream: Stream, unmoved: Any) -> None:
    """Check that the client cannot tell, up to the last digits of log-probabilities."""
    answer = stream.result()
    assert answer.error is None
    assert answer.usage == unmoved.usage
    assert answer.choices.keys() == unmoved.choices.keys()
    for index, choice in answer.choices.items():
        assert alike(vars(choice), vars(unmoved.choices[index]), ROUNDING)


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("name", CASES)
def test_a_moved_answer_is_unchanged(bench: Bench, name: str, via: str) -> None:
    """By KV its state comes with it; by tokens it is recomputed."""
    unmoved = bench.unmoved(name)
    with bench.slowed():
        stream = bench.stream(name)
        reports = bench.operator.move(stream, via)
    assert [(report["outcome"], report["via"]) for report in reports] == [("committed", via)] * len(unmoved.choices)
    check(stream, unmoved)


def test_a_hand_over_after_the_first_token_leaves_the_answer_unchanged(bench: Bench) -> None:
    """What a prefill worker does with each: the whole prompt's state is copied at the cost of one step."""
    unmoved = bench.unmoved("long prompt")
    with slowed(bench.faults, CHUNK_S):
        stream, one = bench.seen_prefilling(bench.body("long prompt"), "handed over")
        there = "w1" if one["worker"] == "w0" else "w0"
        report = bench.operator.migrate(one["request"], there, None, after_first_token=True)
    assert (report["outcome"], report["via"]) == ("committed", "kv")
    check(stream, unmoved)


def test_many_moves_at_once_leave_every_answer_unchanged(bench: Bench) -> None:
    """A worker is emptied: all go, each with its own state, and come back."""
    names = ["greedy", "seeded", "penalties", "n", "min_tokens"]
    bench.learn(names)
    with bench.slowed():
        streams = {name: bench.stream(name) for name in names}
        movers = [threading.Thread(target=bench.operator.move, args=(stream, None)) for stream in streams.values()]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
    for name, stream in streams.items():
        check(stream, bench.unmoved(name))


def test_cached_prefixes_are_found_with_their_states(bench: Bench) -> None:
    """A continued chat answers as without a cache."""
    prompt = [5 + 7 * number % 2000 for number in range(700)]
    for tokens in (700, 400, 650, 200, 699):
        body = {"prompt": prompt[:tokens], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        alone = Stream(bench.daemon, body | {"cache_salt": f"{tokens} alone"}).result()
        found = Stream(bench.daemon, body | {"cache_salt": "found"}).result()
        assert found.choices[0].text == alone.choices[0].text


def test_a_killed_worker_s_requests_continue(bench: Bench) -> None:
    """With the worker its states are gone: they are recomputed elsewhere."""
    names = ["long", "seeded"]
    bench.learn(names)
    with bench.slowed():
        streams = {name: bench.stream(name) for name in names}
        [one] = bench.operator.requests_of(streams["long"])
        [pid] = [int(w["pid"]) for w in bench.operator.status()["workers"] if w["worker"] == one["worker"]]
        os.kill(pid, signal.SIGKILL)
        bench.operator.wait_gone(one["worker"], pid)
    for name, stream in streams.items():
        check(stream, bench.unmoved(name))


def test_a_short_request_is_counted_with_its_states(bench: Bench) -> None:
    """It takes three blocks for states beside the one for its tokens, and a move has to carry them."""
    with bench.slowed():
        stream = Stream(bench.daemon, CASES["greedy"] | {"messages": [{"role": "user", "content": "Hi"}]})
        stream.wait_chunks(4)
        [worker] = [one for one in bench.operator.status()["workers"] if one["used_blocks"]]
        [report] = bench.operator.move(stream, "kv")
    assert worker["used_blocks"] >= 4
    assert report["blocks"] >= 4
    assert stream.result().error is None


@pytest.mark.parametrize("lost", ["w1", None, "w0"])
def test_under_roles_each_state_is_handed_over_after_the_first_token(
    bench: Bench, split: Bench, lost: str | None
) -> None:
    """From the worker that computes prompts to the one that decodes, which may die, too; the client cannot tell."""
    names = ["greedy", "penalties", "n", "long prompt"]
    bench.learn(names)
    with split.slowed():
        streams = {name: split.stream(name) for name in names}
        split.operator.wait(lambda status: {one["worker"] for one in status["requests"]} == {"w1"}, PATIENCE_S)
        requests = [one["request"] for one in split.operator.status()["requests"]]
        if lost:
            [pid] = [int(one["pid"]) for one in split.operator.status()["workers"] if one["worker"] == lost]
            os.kill(pid, signal.SIGKILL)
            split.operator.wait_gone(lost, pid)
    for name, stream in streams.items():
        check(stream, bench.unmoved(name))
    assert len(requests) == len(names) + 2, "three of one call"
    for request in requests:
        first = next(line for line in split.operator.story(request)["lines"] if line["what"] == "moved")
        assert (first["source"], first["worker"], first["via"]) == ("w0", "w1", "kv")
    split.operator.wait_ready()
    split.operator.wait_idle()
