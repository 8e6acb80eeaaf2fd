"""Records what steps count in vLLM's own metrics.

Owns the shortcut for steps that only continue answers.
"""

import bisect
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend.plain_outputs import MOST_AT_ONCE, take_all


class Bisected(Histogram):
    """A histogram that finds the bucket of a value by halves; the library tries each, fifteen times for a request."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None, times: int = 1) -> None:  # noqa: ARG002
        """See the library, but for so many equal values; a number each, without exemplars."""
        self._sum.inc(amount * times)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(times)


class StepLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's metrics, with less work for most steps: their tokens only continue answers, and share one latency."""

    _histogram_cls = Bisected

    def record(self, scheduler_stats: Any, iteration_stats: Any, *more: Any, engine_idx: int = 0, **named: Any) -> None:
        """See vLLM."""
        if (stats := iteration_stats) is not None:
            if stats.time_to_first_tokens_iter or stats.finished_requests or stats.num_preempted_reqs:
                self._waited(stats.inter_token_latencies_iter, engine_idx)
                iteration_stats = copy.copy(stats)  # another logger counts it, too
                iteration_stats.inter_token_latencies_iter = []
            else:
                self.continued(stats, engine_idx)
                iteration_stats = None
        super().record(scheduler_stats, iteration_stats, *more, engine_idx=engine_idx, **named)

    def continued(self, stats: Any, engine_idx: int) -> None:
        """Record a step that only continues answers."""
        self.counter_generation_tokens[engine_idx].inc(stats.num_generation_tokens)
        self.histogram_iteration_tokens[engine_idx].observe(stats.num_generation_tokens)
        self._waited(stats.inter_token_latencies_iter, engine_idx)

    def _waited(self, latencies_s: list[float], engine_idx: int) -> None:
        histogram = self.histogram_inter_token_latency[engine_idx]
        for latency_s, tokens in Counter(latencies_s).items():
            histogram.observe(latency_s, times=tokens)


def step_taker(states: Mapping[str, Any], loggers: Sequence[Any]) -> Callable[[Step], bool]:
    """Return what does the work of vLLM's output handler for a step that only continues answers, and False for others.

    It takes none if another logger counts too: vLLM's own, which is there if its log level is INFO, or a plugin.
    """
    if not all(isinstance(logger, StepLogger) for logger in loggers):
        return lambda _: False

    def take(step: Step) -> bool:
        if not step.tokens:
            return True
        if len(step.tokens) > MOST_AT_ONCE or (counts := take_all(states, step.tokens.items(), step.timestamp)) is None:
            return False
        for logger in loggers:
            logger.continued(counts, step.engine_index)
        return True

    return take
