"""What the reports of steps carry of vLLM's statistics."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from melld.engine.wire.messages import BlockReport
from melld.engine.worker.migration_book import Book
from melld.engine.worker.report import StepReporter


def reporter(clock: Callable[[], float]) -> tuple[StepReporter, list[SchedulerStats | None]]:
    """Return a reporter of a worker without requests, and the statistics that it has sent."""
    sent: list[Any] = []
    blocks = SimpleNamespace(collect=lambda: BlockReport(0, 8, 0, {}))
    parts = cast("Any", blocks), Book(), cast("Any", SimpleNamespace(warming=[]))
    return StepReporter(*parts, lambda _, told: sent.append(told and told.scheduler_stats), clock), sent


def step(running: int, usage: float, **more: Any) -> EngineCoreOutputs:
    """Return the outputs of a step with these statistics."""
    return EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=running, kv_cache_usage=usage, **more))


def test_the_usage_of_the_cache_alone_is_told_now_and_then() -> None:
    """A gauge that is read every few seconds is not sent with each token."""
    times = iter((0.0, 0.01, 0.02, 0.03, 0.2))
    made, sent = reporter(lambda: next(times))
    for running, usage in ((1, 0.1), (1, 0.2), (2, 0.3), (2, 0.4), (2, 0.5)):
        made.report(step(running, usage), 0.01)
    assert [None if one is None else one.kv_cache_usage for one in sent] == [0.1, None, 0.3, None, 0.5]


def test_statistics_that_count_are_all_told() -> None:
    """Counters of prefix hits and drafted tokens are sums of what is sent."""
    made, sent = reporter(lambda: 0.0)
    for _ in range(3):
        made.report(step(1, 0.1, prefix_cache_stats=PrefixCacheStats(requests=1, queries=5)), 0.01)
        made.report(step(1, 0.1, spec_decoding_stats=SpecDecodingStats.new(2)), 0.01)
    assert None not in sent


def test_a_worker_without_requests_tells_that_its_cache_is_free() -> None:
    """The last request's blocks are freed a step after its last token, and then an idle worker says no more."""
    times = iter((0.0, 0.21, 0.215))
    made, sent = reporter(lambda: next(times))
    for running, usage in ((1, 0.11), (0, 0.11), (0, 0.0)):
        made.report(step(running, usage), 0.01)
    assert [None if one is None else one.kv_cache_usage for one in sent] == [0.11, 0.11, 0.0]


def test_vllm_s_outputs_are_sent_only_where_they_hold_more_than_tokens() -> None:
    """Most of a step is a few bytes for each request, and the daemon makes no object of it."""
    said: list[Any] = []
    blocks = SimpleNamespace(collect=lambda: BlockReport(0, 8, 0, {}))
    book = Book({"a": 3, "b": 0, "c": 0})
    parts = cast("Any", blocks), book, cast("Any", SimpleNamespace(warming=[]))
    made = StepReporter(*parts, lambda *told: said.append(told))
    last = EngineCoreOutput("b", [2], finish_reason=FinishReason.LENGTH)
    first = EngineCoreOutput("c", [4], prefill_stats=PrefillStats())
    outputs = [EngineCoreOutput("a", [1]), last, EngineCoreOutput("a", [5]), first]
    made.report(EngineCoreOutputs(outputs=outputs, timestamp=7.0), 0.01)
    made.report(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [6, 7])], weight_version="default"), 0.01)
    (done, rest), (later, none) = said
    assert (done.tokens, done.leases, done.timestamp_s) == ({"a": [1]}, {"a": 3}, 7.0)
    assert rest.outputs == [last, outputs[2], first]
    assert (later.tokens, none) == ({"a": [6, 7]}, None)
    assert done.gone == ["b"]
