"""Front ends are made in a thread before there is a worker, and lack nothing once they are connected to one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.forked import run_python
from tests.tiny_models import make_adapter

# vLLM is imported in a process of its own, which answers all questions.
SCRIPT = """
import asyncio, gc, json, sys, threading
from types import SimpleNamespace as Some
from weakref import WeakSet
import msgspec
import prometheus_client
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from transformers import PreTrainedTokenizerBase
from vllm.parser import abstract_parser
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.metrics import loggers
from melld.config_text import parse_config
from melld.engine.frontend import prepared
from melld.engine.frontend.frontend import Frontend
from melld.engine.frontend.prepared import fit
from melld.engine.frontend.rehearsal import prepare_all, read
from melld.engine.frontend.vllm_metrics import VllmMetrics
from melld.errors import ConfigError

(path, adapter), told = sys.argv[1:], {}
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
LORA = [{"name": "pirate", "path": adapter}]


def config_of(name, options, lora=()):
    told = {"model.path": path, "model.name": name, "model.vllm": options, "model.lora": lora, "devices.cpu": 1}
    return parse_config("", "the test", told)


class Fleet:
    places, ready = ["w0"], {}

    def __init__(self, tasks, max_model_len, refusal=""):
        self.loaded, self._refusal = [], refusal
        self.outputs, self.requests = asyncio.Queue(), Some(failures=asyncio.Queue())
        empty = {int: 0, str: "", bool: False}
        known = {name: empty.get(kind) for name, kind in EngineCoreReadyResponse.__annotations__.items()}
        known |= {"max_model_len": max_model_len, "num_gpu_blocks": 8, "block_size": 16}
        self.last_ready = Some(ready_response=msgspec.msgpack.encode(known), supported_tasks=tasks)

    async def load_adapter(self, adapter):
        if self._refusal:
            raise RuntimeError(self._refusal)
        self.loaded.append(adapter.lora_name)
        return True


def series():
    return sorted({(one.labels["model_name"], one.labels["outcome"], one.value)
                   for family in VLLM.collect() for one in family.samples
                   if one.name == "vllm:tool_call_parser_invocations_total" and one.value})


def labels():
    return sorted({one.labels.get("model_name", "") for collector in (VLLM, prometheus_client.REGISTRY)
                   for family in collector.collect() for one in family.samples if one.name.startswith("vllm:")})


def call(model):
    request = ChatCompletionRequest(model=model, messages=[])
    abstract_parser.record_tool_parser_invocation(is_tool_called=True, is_streaming=False, request=request)


def made(configs):
    return prepare_all(configs, "cpu", {name: read(config, "cpu") for name, config in configs.items()})


makers, init = set(), prepared.init_app_state
async def watched(*arguments):
    makers.add(threading.current_thread() is threading.main_thread())
    await init(*arguments)
prepared.init_app_state = watched
VLLM = VllmMetrics(prometheus_client.REGISTRY, lambda: "first")


async def connected(config, front, *workers):
    front = await fit(front, fleet := Fleet(*workers))
    front.frontend.connect(fleet, front.tasks, None)
    VLLM.keep(config.model.names[0], config.model, front.arguments.tool_call_parser)
    return front, fleet


class Plugin(loggers.StatLoggerBase):
    makers = []

    def __init__(self, vllm_config, engine_index=0):
        self.makers.append(threading.current_thread() is threading.main_thread())

    def record(self, *_, **__): ...
    def log_engine_initialized(self): ...


def tokenizers():
    return [one for one in gc.get_objects() if isinstance(one, PreTrainedTokenizerBase)]


def come_and_go(configs):
    known = WeakSet(tokenizers())
    fronts = made(configs)
    new = WeakSet(one for one in tokenizers() if one not in known)
    assert len(new) >= len(fronts)
    for front in fronts.values():
        front.frontend.shutdown()
    return new


async def main():
    new = await asyncio.to_thread(come_and_go, {"guest": config_of("guest", TOOLS)})
    gc.collect()
    told["tokenizers left"] = len(new)
    configs = {"first": config_of("first", TOOLS), "second": config_of("second", TOOLS, LORA)}
    configs["pooler"] = config_of("pooler", {"runner": "pooling"})
    fronts = await asyncio.to_thread(made, configs)
    told["registered by making"] = labels()
    length = fronts["first"].max_model_len
    _, fleet = await connected(configs["second"], fronts["second"], ("generate",), length)
    told["adapters"] = fleet.loaded
    try:
        await fit(fronts["second"], Fleet(("generate",), length, "no such adapter"))
    except RuntimeError as error:
        told["refused adapter"] = str(error)
    first, _ = await connected(configs["first"], fronts["first"], ("generate",), length)
    told["kept as made"] = first is fronts["first"]
    shorter, _ = await connected(configs["first"], fronts["first"], ("generate",), length // 2)
    told["length"], told["shorter by"] = length, length - shorter.serving.openai_serving_chat.model_config.max_model_len
    pooler, _ = await connected(configs["pooler"], fronts["pooler"], ("embed",), length)
    told["pools"] = hasattr(pooler.serving, "serving_embedding")
    call("second")
    call("pirate")
    call(None)
    told["counted"] = series()
    del fronts, first, shorter, pooler

    before = len([one for one in gc.get_objects() if isinstance(one, Frontend)]), labels(), threading.active_count()
    broken = config_of("broken", TOOLS | {"chat_template": "{% for"})
    try:
        await asyncio.to_thread(made, {"third": config_of("third", TOOLS), "broken": broken})
    except ConfigError as error:
        told["refused"] = error.where
    gc.collect()
    after = len([one for one in gc.get_objects() if isinstance(one, Frontend)]), labels(), threading.active_count()
    told["left by what was refused"] = [now for now, then in zip(after, before) if now != then]
    call("first")
    told["counted after"] = series()
    VLLM.forget("second")
    call("first")
    told["counted at last"] = series()
    VLLM.forget("first")
    call(None)
    told["made on the loop"] = True in makers

    loggers.load_plugins_by_group = lambda _: {"ours": Plugin}
    configs = {"plugged": config_of("plugged", {})}
    fronts = await asyncio.to_thread(made, configs)
    _, fleet = await connected(configs["plugged"], fronts["plugged"], ("generate",), length)
    told["plugin's makers"] = Plugin.makers


asyncio.run(main())
print("TOLD", json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened to front ends of three models, and to those of a reload that was refused."""
    adapter = tmp_path_factory.mktemp("adapters") / "pirate"
    make_adapter(demo_model, adapter, 0)
    words = str(demo_model), str(adapter)
    done = run_python("-c", SCRIPT, *words, env=os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    found: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
    return found


def test_no_front_end_is_made_on_the_loop(told: dict[str, Any]) -> None:
    """Other models' streams would stand still for as long as those of all added models take."""
    assert not told["made on the loop"]
    assert told["kept as made"], "what was tried is what serves"


def test_what_a_worker_finds_out_is_in_its_front_end(told: dict[str, Any]) -> None:
    """The length that fits into memory, and what a pooling model's worker can do, are known late."""
    assert told["shorter by"] == told["length"] // 2
    assert told["pools"]


def test_workers_load_the_adapters(told: dict[str, Any]) -> None:
    """The first request with one would wait for it; a model whose adapter cannot be loaded says so at once."""
    assert (told["adapters"], told["refused adapter"]) == (["pirate"], "no such adapter")


def test_each_model_s_tool_calls_are_counted_under_its_name(told: dict[str, Any]) -> None:
    """Whichever front end was made last, and whether it came to serve; without a name they are the first model's."""
    assert told["registered by making"] == []
    assert told["counted"] == [["first", "tool_call", 1.0], ["second", "tool_call", 2.0]]
    assert told["counted after"] == [["first", "tool_call", 2.0], ["second", "tool_call", 2.0]]
    assert told["counted at last"] == [["first", "tool_call", 3.0]]


def test_a_plugin_s_logger_is_made_once_and_on_the_loop(told: dict[str, Any]) -> None:
    """Two would count everything twice, and metrics that another thread registers are taken for another model's."""
    assert told["plugin's makers"] == [True]


def test_a_refused_reload_leaves_nothing(told: dict[str, Any]) -> None:
    """No front end, metric or thread, also of the models that vLLM had accepted before."""
    assert told["refused"] == "[model.vllm] chat_template"
    assert told["left by what was refused"] == []


def test_removed_models_leave_no_tokenizer(told: dict[str, Any]) -> None:
    """One of 150,000 tokens takes 100 MB, and models come and go."""
    assert told["tokenizers left"] == 0
