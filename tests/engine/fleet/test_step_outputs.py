"""Outputs that wait for the front end."""

import asyncio

import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from melld.engine.fleet.step_outputs import MOST_STEPS, Step, StepOutputs
from melld.ids import RequestId, WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")


def step(*outputs: EngineCoreOutput, **tokens: list[int]) -> Step:
    """Return what one step has made."""
    return Step({RequestId(request): token_ids for request, token_ids in tokens.items()}, list(outputs))


def end(request: str, number: int) -> EngineCoreOutput:
    """Return a request's last token."""
    return EngineCoreOutput(request, [number], finish_reason=FinishReason.LENGTH)


def taken(queue: StepOutputs) -> list[tuple[str, list[int]]]:
    """Return everything in the queue, in the order in which the front end gets it."""
    found: list[tuple[str, list[int]]] = []
    while not queue.empty():
        got = queue.get_nowait()
        found += [*got.tokens.items(), *((one.request_id, one.new_token_ids) for one in got.outputs)]
    return found


def make() -> tuple[StepOutputs, list[str]]:
    """Make a queue, and a log of what it tells the workers' reader."""
    said: list[str] = []
    pause, resume = (lambda worker: said.append(f"pause {worker}")), (lambda worker: said.append(f"go {worker}"))
    return StepOutputs(pause, resume), said


def test_queued_tokens_merge() -> None:
    """A daemon that is behind catches up: several tokens of a request cost little more than one."""
    queue, _ = make()
    queue.put_step(W0, step(a=[1], b=[2]))
    queue.put_step(W1, step(c=[3]))
    queue.put_step(W0, step(a=[4], d=[5]))
    assert taken(queue) == [("a", [1, 4]), ("b", [2]), ("d", [5]), ("c", [3])]


def test_tokens_before_and_after_an_output_keep_their_order() -> None:
    """The first output of a request holds more than tokens, as does its last."""
    queue, _ = make()
    queue.put_step(W0, step(EngineCoreOutput("a", [1], events=[]), b=[5]))
    queue.put_step(W0, step(a=[2], b=[6]))
    queue.put_step(W0, step(end("a", 3), end("b", 7)))
    assert taken(queue) == [("b", [5, 6]), ("a", [1, 2]), ("a", [3]), ("b", [7])]


def test_a_new_worker_s_outputs_follow_the_old_one_s() -> None:
    """A moved request's tokens stay in order, even if its new worker's outputs are further ahead."""
    queue, _ = make()
    queue.put_step(W1, step(b=[1]))
    queue.put_step(W0, step(a=[2]))
    queue.seal()
    queue.put_step(W1, step(a=[3], b=[4]))
    assert taken(queue) == [("b", [1]), ("a", [2]), ("a", [3]), ("b", [4])]


def test_a_worker_that_is_far_ahead_waits() -> None:
    """The daemon's queue of fast workers' outputs is bounded."""
    queue, said = make()
    for number in range(MOST_STEPS):
        assert said == []
        queue.put_step(W0, step(a=[number]))
    assert said == ["pause w0"]
    assert taken(queue) == [("a", list(range(MOST_STEPS)))]
    assert said[-1] == "go w0"


def test_every_step_s_statistics_are_passed_on() -> None:
    """They are counters, too: those of a merged step are not lost."""
    queue, _ = make()
    queue.put_step(W0, step(a=[1]))
    joined = step(a=[2])
    joined.scheduler_stats = object()
    queue.put_step(W0, joined)
    assert [(len(one.tokens), one.scheduler_stats) for one in (queue.get_nowait(), queue.get_nowait())] == [
        (1, None),
        (0, joined.scheduler_stats),
    ]


async def test_a_waiting_front_end_takes_a_step_at_once() -> None:
    """No turn of the loop lies between a worker's report and a client's event."""
    queue, _ = make()
    ends: list[bool] = []

    def take(given: Step) -> bool:
        ends.append(bool(given.outputs))
        return not ends[-1]

    reading = asyncio.create_task(queue.get_or_take(take))
    await asyncio.sleep(0)
    queue.put_step(W0, step(a=[1]))
    queue.put_step(W0, step(end("a", 2)))
    queue.put_step(W0, step(b=[3]))  # behind the one that waits
    assert ends == [False, True]
    got = await reading
    assert ([*got.tokens], [one.request_id for one in got.outputs]) == (["b"], ["a"])


async def test_a_front_end_that_is_behind_gets_steps_merged() -> None:
    """What costs least for each token is left to it while more has come than can be passed on one by one."""
    is_behind = True
    queue = StepOutputs(lambda _: None, lambda _: None, lambda: is_behind)
    reading = asyncio.create_task(queue.get_or_take(lambda _: True))
    await asyncio.sleep(0)
    queue.put_step(W0, step(a=[1]))
    is_behind = False
    queue.put_step(W0, step(a=[2]))
    assert (await reading).tokens == {"a": [1, 2]}


async def test_an_error_of_taking_ends_the_reading() -> None:
    """The outputs' reader tells all calls of it, and is started again."""
    queue, _ = make()

    def fail(_: Step) -> bool:
        raise RuntimeError("no such token")

    reading = asyncio.create_task(queue.get_or_take(fail))
    await asyncio.sleep(0)
    queue.put_step(W0, step(a=[1]))
    with pytest.raises(RuntimeError, match="no such token"):
        await reading
