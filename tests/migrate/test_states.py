"""A daemon with a model that keeps states: moved, handed over or killed, requests answer as if nothing happened."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.migrate.live import CASES, CHUNK_S, THINKS, Bench, Stream, alike, linked_workers
from tests.worker_faults import slowed

ROUNDING = 1e-4
"""Log-probabilities of what is computed again: a prompt's states are other sums than those of single tokens."""
HERE = ("penalties",)
"""In the short form."""


@pytest.fixture(scope="module")
def bench(model_of: Callable[[str], Path]) -> Iterator[Bench]:
    """Two workers with a Granite 4: three layers of Mamba 2, and one of attention."""
    flags = (*THINKS, "--kv-bytes", "64MiB", "--set", "health.steady_after_s=0")
    flags += ("--set", "model.vllm.max_num_batched_tokens=512")  # a prompt of 3,000 tokens takes six steps
    with linked_workers(model_of("granite4_h"), *flags) as process:
        yield Bench(process, process.faults)


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
@pytest.mark.parametrize(
    "name", [name if name in HERE else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
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
