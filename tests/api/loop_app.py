"""The API over vLLM's own serving classes and an instant worker, with a watch on its event loop.

A program, `python -m`, with a model's directory and a runner of vLLM's.  It prints its URL; then, for each line that it
reads, the longest processor time for which anything has held up the loop since the last one.
"""

import asyncio
import contextlib
import hashlib
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from melld.api.app import prepare_serving, start_api
from melld.config import Config, DevicesConfig, ModelConfig
from melld.engine.arguments import engine_arguments
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.step_outputs import Step, StepOutputs
from melld.engine.frontend.codec import EngineCodec
from melld.engine.frontend.frontend import vllm_config_of
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.prepared import front_of, leave_to_collect, serving_arguments
from tests.api.contexts import context_of

TICK_S = 0.001
STEP = 8
"""Tokens in a step: as many as a worker makes in some tens of milliseconds."""
PART_OF_A_CHARACTER = 200
"""The token whose log-probability takes vLLM longest to tell."""
MOST_TOKENS = 32768
VLLM = {"max_model_len": MOST_TOKENS, "hf_overrides": {"max_position_embeddings": MOST_TOKENS}}
TASKS = {"generate": ("generate",), "pooling": ("embed",)}
VECTOR = torch.linspace(-1, 1, 1024)
"""An embedding as long as most."""


class Worker:
    """Stand-in for the fleet: every request gets its tokens and log-probabilities once admitted."""

    def __init__(self) -> None:
        self.places = {0: None}
        self.requests = self
        self.failures: asyncio.Queue[object] = asyncio.Queue()
        self.outputs = StepOutputs(lambda _: None, lambda _: None, lambda: False)
        self.codec = EngineCodec()
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, request: EngineCoreRequest, _client: str) -> None:
        self.codec.encode_request(request)
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, _requests: list[str]) -> None:
        """Do nothing: it has already answered."""

    async def _answer(self, request: EngineCoreRequest) -> None:
        if request.pooling_params is not None:
            vector = EngineCoreOutput(request.request_id, [], pooling_output=VECTOR, finish_reason=FinishReason.STOP)
            self.outputs.put_nowait(Step(outputs=[vector]))
            return
        params = request.sampling_params
        assert params is not None
        assert request.prompt_token_ids is not None
        left, prompt = params.max_tokens or 1, None
        if params.prompt_logprobs is not None:
            prompt = LogprobsTensors(
                *map(torch.from_numpy, _logprobs(len(request.prompt_token_ids) - 1, params.prompt_logprobs))
            )
        while left > 0:
            count = min(left, STEP)
            left -= count
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[PART_OF_A_CHARACTER] * count,
                new_logprobs=None
                if params.logprobs is None
                else LogprobsLists(*_logprobs(count, params.logprobs), None),
                new_prompt_logprobs_tensors=prompt,
                finish_reason=None if left else FinishReason.LENGTH,
            )
            prompt = None
            self.outputs.put_nowait(Step(outputs=[output]))
            await asyncio.sleep(0)


def _logprobs(positions: int, most_likely: int) -> tuple[Any, Any, Any]:
    tokens = np.arange(PART_OF_A_CHARACTER, PART_OF_A_CHARACTER + most_likely + 1)
    values = np.full((positions, most_likely + 1), -1.5, dtype=np.float32)
    return np.tile(tokens, (positions, 1)), values, np.ones(positions, dtype=np.int64)


class Asked:
    """The one model."""

    names, adapters = ("m",), ()

    def __init__(self, serving: Any) -> None:
        self.serving = serving

    def check_queue(self, _client: str, _priority: int) -> None:
        """There is always room."""

    def why_closed(self) -> str | None:
        return None

    def called(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def until_loaded(self) -> None:
        """It is."""

    def status(self) -> Any:
        return None


class Bench:
    """Judges that know every constraint."""

    async def judge(self, constraint: bytes, _client: str) -> bytes:
        hashlib.sha256(constraint).digest()
        return constraint


class Watch(selectors.DefaultSelector):
    """The loop's selector, called between turns: records the longest time for which the loop was blocked.

    Held up it is by its own work in a turn, or by another thread that keeps the interpreter's lock.  Both are told by
    the processor time that they take: what a thread waits for a processor is the machine's doing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._schedule = Path("/proc/thread-self/schedstat").open(encoding="ascii")  # noqa: SIM115
        self._worst_s = 0.0
        self._turn_s = time.thread_time()
        self._last = self._now()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._look()
        events = super().select(timeout)
        self._turn_s = time.thread_time()
        return events

    async def run(self) -> None:
        while True:
            self._last = self._now()
            await asyncio.sleep(TICK_S)
            self._look()

    def _now(self) -> tuple[float, float]:
        """Return the CPU time of this thread in seconds, without waits or other threads."""
        self._schedule.seek(0)
        waited_ns = int(self._schedule.read().split()[1])
        return time.monotonic() - waited_ns / 1e9, time.process_time() - time.thread_time()

    def _look(self) -> None:
        passed_s, worked_s = self._now()
        by_others_s = min(passed_s - self._last[0], worked_s - self._last[1])
        self._worst_s = max(self._worst_s, time.thread_time() - self._turn_s, by_others_s)

    def read(self) -> float:
        """Return and reset the longest delay, including one that is still going on."""
        self._look()
        worst_s, self._worst_s = self._worst_s, 0.0
        self._turn_s, self._last = time.thread_time(), self._now()
        return worst_s


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(model: str, kind: str, watch: Watch) -> None:
    vllm = VLLM | {"runner": kind}
    config = Config(model=ModelConfig(path=model, name="m", vllm=vllm), devices=DevicesConfig())
    engine = engine_arguments(config, "cpu")
    vllm_config = vllm_config_of(config, engine)
    arguments = serving_arguments(config, engine, vllm_config)
    prepared = await asyncio.to_thread(front_of, vllm_config, arguments, TASKS[kind])
    prepared.frontend.connect(cast("Fleet", Worker()), prepared.tasks, cast("Judges", Bench()))
    await prepared.frontend.learn_token_texts()
    listener = socket.create_server(("127.0.0.1", 0))
    leave_to_collect()
    prepare_serving(prepared.serving)
    async with start_api(context_of([Asked(prepared.serving)]), [listener]):
        ticking = asyncio.create_task(watch.run())
        say(f"http://127.0.0.1:{listener.getsockname()[1]}")
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            say(str(watch.read()))
        ticking.cancel()


if __name__ == "__main__":
    watch = Watch()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watch)) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], watch))
