"""What vLLM's front end hands to the fleet."""

import asyncio
import time

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend.caller import Caller, LogprobAccount, called_by
from melld.engine.frontend.fleet_client import FleetClient
from melld.engine.frontend.masks import Masks
from melld.engine.frontend.plain_outputs import MOST_AT_ONCE, Counts, Others, Tokens
from melld.engine.frontend.prompt_logprobs import PromptLogprobs
from melld.engine.frontend.turns import Turns
from melld.ids import RequestId
from tests.serve.offline_daemon import OfflineDaemon


def request_stamped(name: str, wall_clock_s: float) -> EngineCoreRequest:
    """Return a request as vLLM makes it at this time of day."""
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=None,
        pooling_params=None,
        arrival_time=wall_clock_s,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def test_a_clock_that_is_set_back_reorders_nothing() -> None:
    """Workers start the earliest and preempt the latest: an hour set back would reverse that for an hour."""
    daemon, turns = OfflineDaemon(), Turns()
    answers = PromptLogprobs({}, daemon.fleet.outputs.put_nowait, turns)
    client = FleetClient(daemon.fleet, ("generate",), 10, answers, Masks({}, 10), turns)
    before, after = request_stamped("before", 1_800_003_600.0), request_stamped("after", 1_800_000_000.0)
    for request in (before, after):
        with called_by(Caller("", LogprobAccount(), 0)):
            await client.add_request_async(request)
    assert [RequestId("before"), RequestId("after")] == list(daemon.fleet.live)
    assert before.arrival_time < after.arrival_time


async def test_further_prompts_of_a_call_wait_for_their_turns() -> None:
    """A call with many prompts would hold up all streams; the first was prepared in a turn."""
    daemon, turns = OfflineDaemon(), Turns()
    waited: list[int] = []

    async def mine() -> None:
        waited.append(len(daemon.fleet.live))

    turns.mine = mine  # type: ignore[method-assign]
    answers = PromptLogprobs({}, daemon.fleet.outputs.put_nowait, turns)
    client = FleetClient(daemon.fleet, ("generate",), 10, answers, Masks({}, 10), turns)
    with called_by(Caller("", LogprobAccount(), 0)):
        for name in "abc":
            await client.add_request_async(request_stamped(name, 1.0))
    assert waited == [1, 2]


async def test_many_queued_outputs_let_other_work_run() -> None:
    """While workers are faster than the daemon, it still answers `/health` and admits requests."""
    daemon, turns = OfflineDaemon(), Turns()
    answers = PromptLogprobs({}, daemon.fleet.outputs.put_nowait, turns)
    client = FleetClient(daemon.fleet, ("generate",), 10, answers, Masks({}, 10), turns)
    for _ in range(40):
        daemon.fleet.outputs.put_nowait(Step())
    others: list[int] = []

    async def another() -> None:
        while True:
            others.append(daemon.fleet.outputs.qsize())
            await asyncio.sleep(0)

    task = asyncio.create_task(another())
    for _ in range(40):
        await client.get_output_async()
        time.sleep(0.002)  # noqa: ASYNC251 - the work that a step's outputs make
    task.cancel()
    assert len(others) > 5


class State:
    """A request that vLLM has."""


async def test_tokens_that_vllm_must_see_precede_their_request_s_output() -> None:
    """Plain ones are taken before, a part in each turn of the loop, and counted once."""
    daemon, turns = OfflineDaemon(), Turns()
    states = {"masked": State()}
    masks = Masks(states, 10)
    masks.add("masked", SamplingParams(allowed_token_ids=[2, 3]))
    client = FleetClient(
        daemon.fleet, ("generate",), 10, PromptLogprobs(states, daemon.fleet.outputs.put_nowait, turns), masks, turns
    )
    parts: list[int] = []

    def take_plain(tokens: Tokens, _timestamp_s: float, counts: Counts) -> Others:
        parts.append(len(list(tokens)))
        counts.num_generation_tokens += parts[-1]
        return [one for one in tokens if one[0] == "raw"]

    client.take_plain = take_plain
    tokens = {RequestId(str(number)): [1] for number in range(MOST_AT_ONCE)}
    tokens |= {RequestId("masked"): [2], RequestId("raw"): [4]}
    daemon.fleet.outputs.put_nowait(Step(tokens, [EngineCoreOutput("masked", [3]), EngineCoreOutput("raw", [5])]))
    step = await client.get_output_async()
    assert (step.tokens, parts) == ({}, [MOST_AT_ONCE, 1])
    counts, *outputs = step.outputs
    assert counts.num_generation_tokens == MOST_AT_ONCE + 1
    seen = [(one.request_id, one.new_token_ids) for one in outputs]
    assert [one for one in seen if one[0] == "masked"] == [("masked", [2]), ("masked", [3])]
    assert [one for one in seen if one[0] == "raw"] == [("raw", [4]), ("raw", [5])]
