"""Outputs that wait for the front end."""

import asyncio

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from melld.engine.fleet.step_outputs import MOST_STEPS, StepOutputs
from melld.engine.frontend.codec import EngineCodec
from melld.ids import WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")


def step(*outputs: EngineCoreOutput) -> EngineCoreOutputs:
    """Return the outputs of one step."""
    return EngineCoreOutputs(outputs=list(outputs))


def token(request: str, number: int, end: FinishReason | None = None, events: list[object] | None = None) -> object:
    """Return a request's next token."""
    return EngineCoreOutput(request, [number], finish_reason=end, events=events)


def taken(queue: StepOutputs) -> list[tuple[str, list[int], bool]]:
    """Return everything in the queue, in the order in which the front end gets it."""
    found = []
    while not queue.empty():
        found += [(one.request_id, one.new_token_ids, one.finished) for one in queue.get_nowait().outputs]
    return found


def make() -> tuple[StepOutputs, list[str]]:
    """Make a queue, and a log of what it tells the workers' reader."""
    said: list[str] = []
    pause, resume = (lambda worker: said.append(f"pause {worker}")), (lambda worker: said.append(f"go {worker}"))
    return StepOutputs(EngineCodec().join_outputs, pause, resume), said


def test_queued_tokens_merge_into_one_output() -> None:
    """A daemon that is behind catches up: several tokens of a request cost little more than one."""
    queue, _ = make()
    queue.put_step(W0, step(token("a", 1), token("b", 2)))
    queue.put_step(W1, step(token("c", 3)))
    queue.put_step(W0, step(token("a", 4, FinishReason.LENGTH), token("d", 5)))
    assert taken(queue) == [("a", [1, 4], True), ("b", [2], False), ("d", [5], False), ("c", [3], False)]


def test_an_output_with_more_than_tokens_is_not_merged() -> None:
    """Nothing that it says is lost, and its order stays."""
    queue, _ = make()
    queue.put_step(W0, step(token("a", 1)))
    queue.put_step(W0, step(token("a", 2, events=[])))
    queue.put_step(W0, step(token("a", 3)))
    assert taken(queue) == [("a", [1], False), ("a", [2, 3], False)]


def test_a_new_worker_s_outputs_follow_the_old_one_s() -> None:
    """A moved request's tokens stay in order, even if its new worker's outputs are further ahead."""
    queue, _ = make()
    queue.put_step(W1, step(token("b", 1)))
    queue.put_step(W0, step(token("a", 2)))
    queue.seal()
    queue.put_step(W1, step(token("a", 3), token("b", 4)))
    assert taken(queue) == [("b", [1], False), ("a", [2], False), ("a", [3], False), ("b", [4], False)]


def test_a_worker_that_is_far_ahead_waits() -> None:
    """The daemon's queue of fast workers' outputs is bounded."""
    queue, said = make()
    for number in range(MOST_STEPS):
        assert said == []
        queue.put_step(W0, step(token("a", number)))
    assert said == ["pause w0"]
    assert taken(queue) == [("a", list(range(MOST_STEPS)), False)]
    assert said[-1] == "go w0"


def test_every_step_s_statistics_are_passed_on() -> None:
    """They are counters, too: those of a merged step are not lost."""
    queue, _ = make()
    queue.put_step(W0, step(token("a", 1)))
    joined = step(token("a", 2))
    joined.scheduler_stats = object()
    queue.put_step(W0, joined)
    assert [(len(one.outputs), one.scheduler_stats) for one in (queue.get_nowait(), queue.get_nowait())] == [
        (1, None),
        (0, joined.scheduler_stats),
    ]


async def test_a_waiting_front_end_takes_a_step_at_once() -> None:
    """No turn of the loop lies between a worker's report and a client's event."""
    queue, _ = make()
    ends: list[bool] = []

    def take(outputs: EngineCoreOutputs) -> bool:
        ends.extend(one.finished for one in outputs.outputs)
        return not ends[-1]

    reading = asyncio.create_task(queue.get_or_take(take))
    await asyncio.sleep(0)
    queue.put_step(W0, step(token("a", 1)))
    queue.put_step(W0, step(token("a", 2, FinishReason.LENGTH)))
    queue.put_step(W0, step(token("b", 3)))  # behind the one that waits
    assert ends == [False, True]
    assert [one.request_id for one in (await reading).outputs] == ["a", "b"]


async def test_a_front_end_that_is_behind_gets_steps_merged() -> None:
    """What costs least for each token is left to it while more has come than can be passed on one by one."""
    is_behind = True
    queue = StepOutputs(EngineCodec().join_outputs, lambda _: None, lambda _: None, lambda: is_behind)
    reading = asyncio.create_task(queue.get_or_take(lambda _: True))
    await asyncio.sleep(0)
    queue.put_step(W0, step(token("a", 1)))
    is_behind = False
    queue.put_step(W0, step(token("a", 2)))
    assert [one.new_token_ids for one in (await reading).outputs] == [[1, 2]]


async def test_an_error_of_taking_ends_the_reading() -> None:
    """The outputs' reader tells all calls of it, and is started again."""
    queue, _ = make()

    def fail(_: EngineCoreOutputs) -> bool:
        raise RuntimeError("no such token")

    reading = asyncio.create_task(queue.get_or_take(fail))
    await asyncio.sleep(0)
    queue.put_step(W0, step(token("a", 1)))
    with pytest.raises(RuntimeError, match="no such token"):
        await reading
