"""The API over vLLM's own serving classes, and a worker that makes each known token once the previous one is sent.

A program, `python -m`, with a model's directory.  It serves one model for each of `KINDS` and prints its URL.  Then it
obeys lines: `plain` and `whole` let calls write events at once, or have vLLM make each of them; `break` lets every
request fail after its next token.  Each is answered: how many events were written at once since the last line, and how
many requests run.
"""

import asyncio
import random
import socket
import sys
import time
from typing import Any, cast

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from melld.api import app
from melld.api.app import prepare_serving, start_api
from melld.config import Config, DevicesConfig, ModelConfig
from melld.engine.arguments import engine_arguments
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.step_outputs import Step, StepOutputs
from melld.engine.frontend.frontend import vllm_config_of
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.moulds import Mould
from melld.engine.frontend.prepared import front_of, leave_to_collect, serving_arguments
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from tests.api.contexts import context_of
from tests.api.loop_app import Asked, Bench, say

TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
SWITCHED = """\
{%- if reasoning_effort in ('none', 'minimal', 'medium') %}{{ raise_exception('no such effort') }}{% endif -%}
thinking={{ thinking }} effort={{ reasoning_effort }};
{%- for message in messages %}
{{ message.role }}({{ message.reasoning_content }}): {{ message.content }}
{%- endfor %}
assistant:"""
"""A template that shows what it is told, and knows few efforts."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "raw": {"tool_call_parser": "none", "reasoning_parser": "none"},
    "tools": TOOLS,
    "reasoning": {"reasoning_parser": "qwen3"},
    "agents": TOOLS | {"reasoning_parser": "deepseek_r1"},
    "switched": {"reasoning_parser": "deepseek_r1", "chat_template": SWITCHED},
}
THOUGHT = "</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome, and so on"}}\n</tool_call>'
ORDINARY = range(16, 500)
TURNS = 25
"""Of the loop, in which a token is on its way."""


class ScriptedWorker:
    """Stand-in for the fleet: a request's seed picks its tokens, with a thought and a tool call in the middle."""

    def __init__(self) -> None:
        self.places = {0: None}
        self.requests = self
        self.failures: asyncio.Queue[object] = asyncio.Queue()
        self.outputs = StepOutputs(lambda _: None, lambda _: None, lambda: False)
        self.breaks = False
        self.tokenizer: Any = None
        self.running: dict[str, asyncio.Task[None]] = {}

    def admit(self, request: EngineCoreRequest, _client: str) -> None:
        self.running[request.request_id] = asyncio.create_task(self._answer(request))

    def abort(self, requests: list[str]) -> None:
        for request in requests:
            if (running := self.running.pop(request, None)) is not None:
                running.cancel()

    async def _answer(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None
        assert params.max_tokens is not None
        tokens = self._script(random.Random(params.seed or 0), params.max_tokens)
        for index, token in enumerate(tokens):
            if 0 < index < len(tokens) - 1:
                step = Step({RequestId(request.request_id): [token]}, timestamp=time.monotonic())
            else:
                end = FinishReason.LENGTH if index == len(tokens) - 1 else None
                output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[token], finish_reason=end)
                step = Step(outputs=[output], timestamp=time.monotonic())
            self.outputs.put_step(WorkerId("w0"), step)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self.breaks:
                self.failures.put_nowait((request.request_id, MelldError("broken for the test")))
                break
        del self.running[request.request_id]

    def _script(self, chance: random.Random, count: int) -> list[int]:
        tokens = [chance.choice(ORDINARY) for _ in range(count)]
        if count > 100:
            for at, words in ((count // 4, THOUGHT), (count // 2, CALL)):
                tokens[at:at] = self.tokenizer.encode(words, add_special_tokens=False)
        return tokens[:count]


class Named(Asked):
    """A model with this name."""

    def __init__(self, name: str, serving: Any) -> None:
        super().__init__(serving)
        self.names = (name,)


async def serving_of(model: str, name: str, worker: ScriptedWorker, background: set[Any]) -> Any:
    config = Config(
        model=ModelConfig(path=model, name=name, vllm={"max_model_len": 8192} | KINDS[name]), devices=DevicesConfig()
    )
    engine = engine_arguments(config, "cpu")
    vllm_config = vllm_config_of(config, engine)
    arguments = serving_arguments(config, engine, vllm_config)
    prepared = await asyncio.to_thread(front_of, vllm_config, arguments, ("generate",))
    frontend, serving = prepared.frontend, prepared.serving
    frontend.connect(cast("Fleet", worker), prepared.tasks, cast("Judges", Bench()))
    await frontend.learn_token_texts()
    worker.tokenizer = frontend.tokenizer
    background.add(asyncio.create_task(frontend.fail_requests()))
    leave_to_collect()
    prepare_serving(serving)
    return serving


async def main(model: str) -> None:
    workers, background = {name: ScriptedWorker() for name in KINDS}, set[Any]()
    models = [Named(name, await serving_of(model, name, worker, background)) for name, worker in workers.items()]
    outlet_of, cast_of, written = app.outlet_of, Mould.cast, 0

    def counted(mould: Mould, text: str, number: int) -> bytes:
        nonlocal written
        written += 1
        return cast_of(mould, text, number)

    Mould.cast = counted  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    async with start_api(context_of(models), [listener]):
        say(f"http://127.0.0.1:{listener.getsockname()[1]}")
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := (await lines.readline()).decode().strip():
            app.outlet_of = (lambda *_: None) if line == "whole" else outlet_of
            for worker in workers.values():
                worker.breaks = line == "break"
            say(f"{written} {sum(len(worker.running) for worker in workers.values())}")
            written = 0


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
