"""Steps that only continue answers are taken at once, if nobody but the daemon's own logger counts them."""

import asyncio
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.engine import logprobs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.structured_output import backend_xgrammar

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend import frontend
from melld.engine.frontend.frontend import Frontend
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.plain_outputs import MOST_AT_ONCE
from melld.engine.frontend.step_logger import StepLogger
from melld.ids import RequestId

LOG = "vllm.v1.metrics.loggers"
SILENT = SimpleNamespace(
    device_config=SimpleNamespace(device_type="cpu"),
    model_config=None,
    cache_config=SimpleNamespace(num_gpu_blocks=0),
    kv_transfer_config=None,
    ec_transfer_config=None,
    observability_config=SimpleNamespace(cudagraph_metrics=False, enable_mfu_metrics=False),
)
"""As much of a configuration as vLLM's loggers read."""


class Counted(StepLogger):
    """A logger that keeps what it is told."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.tokens: list[int] = []

    def log_engine_initialized(self) -> None:
        """Tell nobody."""

    def continued(self, stats: Any, engine_idx: int) -> None:
        self.tokens.append(stats.num_generation_tokens)


class Answer:
    """The state of a request past its first output."""

    is_prefilling = False

    def __init__(self) -> None:
        self.plain = self
        self.stats = SimpleNamespace(num_generation_tokens=1, last_token_ts=0.0)

    def add(self, _token_ids: list[int]) -> None:
        """Take them."""


Made = Callable[..., Frontend]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Made:
    """Make front ends over as much of vLLM's as they are joined to."""

    def begin(self: Any, **_: Any) -> None:
        self.output_processor = SimpleNamespace(process_outputs=lambda *_: None, lora_states=SimpleNamespace())
        self.input_processor = SimpleNamespace()
        self.renderer = SimpleNamespace(mm_processor=None, shutdown=lambda: None)
        self.vllm_config, self.model_config = SILENT, SimpleNamespace(get_vocab_size=lambda: 8)
        self.output_handler = None

    monkeypatch.setattr(AsyncLLM, "__init__", begin)
    monkeypatch.setattr(Executor, "get_class", lambda _: None)
    monkeypatch.setattr(frontend, "StepLogger", Counted)
    monkeypatch.setattr(frontend, "enable_envs_cache", lambda: None)
    for module, name in (
        (logprobs, "create_sample_logprobs"),
        (logprobs, "convert_ids_list_to_tokens"),
        (backend_xgrammar, "validate_xgrammar_grammar"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # to put it back
    caplog.set_level(logging.ERROR, LOG)

    def make(states: dict[str, Any]) -> Frontend:
        fleet = SimpleNamespace(
            outputs=asyncio.Queue(), requests=SimpleNamespace(failures=asyncio.Queue()), places=["w0"]
        )
        one = Frontend(cast("Any", SILENT))
        one.connect(cast("Any", fleet), (), cast("Judges", None))
        one.output_processor.request_states.update(states)
        return one

    return make


def tokens(count: int) -> Step:
    """Return a step that gives as many requests their next token."""
    return Step({RequestId(str(name)): [7] for name in range(count)})


@pytest.mark.parametrize(("level", "is_taken"), [(logging.ERROR, True), (logging.INFO, False)])
def test_vllm_s_own_log_of_throughput_counts_every_step(
    made: Made, caplog: pytest.LogCaptureFixture, level: int, is_taken: bool
) -> None:
    """`VLLM_LOGGING_LEVEL=INFO` is for people who look for a fault, and must not make one."""
    caplog.set_level(level, LOG)
    one = made({"0": Answer()})
    assert one.engine_core.take_step(tokens(1)) is is_taken
    assert one.logger_manager.stat_loggers[0].tokens == [1] * is_taken


def test_a_large_step_is_not_taken_at_once(made: Made) -> None:
    """The loop runs in the middle of one: hundreds of tokens at once would delay everything else."""
    one = made({str(name): Answer() for name in range(MOST_AT_ONCE + 1)})
    assert one.engine_core.take_step(tokens(MOST_AT_ONCE))
    assert not one.engine_core.take_step(tokens(MOST_AT_ONCE + 1))
    assert one.logger_manager.stat_loggers[0].tokens == [MOST_AT_ONCE]


def test_a_step_that_says_nothing_wakes_nobody(made: Made) -> None:
    """Most steps of a long prompt have no outputs."""
    one = made({})
    assert one.engine_core.take_step(tokens(0))
    assert one.logger_manager.stat_loggers[0].tokens == []


def test_an_engine_that_is_still_read_keeps_no_front_end(made: Made) -> None:
    """A removed model's front end is large, and the garbage collector no longer looks at it."""
    one = made({})
    engine, gone = one.engine_core, weakref.ref(one)
    del one
    assert gone() is None
    assert engine.take_step is not None


async def test_outputs_are_read_as_long_as_they_are_watched(made: Made) -> None:
    """What reads a removed model's outputs would hold all that it needs for it."""
    one = made({})
    one.output_handler = asyncio.create_task(asyncio.Event().wait(), name="outputs")  # type: ignore[assignment]
    watching = asyncio.create_task(one.watch_outputs())
    await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait({watching})
    assert one.output_handler.cancelling()
