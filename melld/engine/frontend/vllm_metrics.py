"""vLLM's own metrics, in a process with several of its front ends.

vLLM's logger unregisters the metrics of earlier front ends (vllm.v1.metrics.prometheus), and one registry cannot hold
two of the same name.  Their series differ in the label `model_name`.  Invocations of tool parsers are counted for the
front end made last, whosever they are: here for the model that the call names.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from vllm.parser import abstract_parser
from vllm.parser import metrics as of_parsers

from melld.config import ModelConfig

PREFIX = "vllm:"
_register_tool_calls, _record_tool_call = of_parsers.init_parser_metrics, of_parsers.record_tool_parser_invocation


def register_no_tool_calls() -> None:
    """Have front ends register no counter of tool parsers' invocations as they are made, maybe for nothing."""
    of_parsers.init_parser_metrics = lambda **_: None


class _Kept(NamedTuple):
    """The metrics of one front end, and the names that calls may have for its model: first that of its label."""

    registry: CollectorRegistry
    names: Sequence[str]
    tool_calls: Any


class VllmMetrics:
    """A collector of the metrics of all front ends.

    Register it; call `keep` after each front end is connected, and `forget` once it is gone.
    """

    def __init__(self, registry: CollectorRegistry, unnamed: Callable[[], str]) -> None:
        """`registry`: where vLLM registers its metrics; `unnamed` returns the key of whom unnamed calls ask."""
        self._registry, self._unnamed = registry, unnamed
        self._kept: dict[str, _Kept] = {}
        abstract_parser.record_tool_parser_invocation = self._record_tool_call

    def forget(self, key: str) -> None:
        """Drop the metrics of this model's front end, if it had one."""
        self._kept.pop(key, None)

    def keep(self, key: str, model: ModelConfig, tool_parser: str | None) -> None:
        """Move the metrics of the latest front end, which is this model's, out of the registry."""
        of_parsers._tool_call_parser_invocations = None  # noqa: SLF001  the only way to count models apart
        if tool_parser is not None:
            _register_tool_calls(model_name=model.names[0])
        kept = CollectorRegistry()
        for collector in list(self._registry._collector_to_names):  # noqa: SLF001  as vLLM itself finds them
            if getattr(collector, "_name", "").startswith(PREFIX):
                self._registry.unregister(collector)
                kept.register(collector)
        names = (*model.names, *(one.name for one in model.lora))
        self._kept[key] = _Kept(kept, names, of_parsers._tool_call_parser_invocations)  # noqa: SLF001

    def _record_tool_call(self, *, request: Any, **found: Any) -> None:
        newest = list(reversed(self._kept.values()))  # of two with a name in common, the older gets no new calls
        unnamed = None if request.model else self._kept.get(self._unnamed())
        kept = next((one for one in newest if request.model in one.names), unnamed)
        if kept is None:
            return  # a response in the background, of a model that is gone
        of_parsers._model_name, of_parsers._tool_call_parser_invocations = kept.names[0], kept.tool_calls  # noqa: SLF001
        _record_tool_call(request=request, **found)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names registered here could not be used by vLLM's next front end in the same registry."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the series of all front ends."""
        merged: dict[str, Metric] = {}
        for kept in self._kept.values():
            for family in kept.registry.collect():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += family.samples
        yield from merged.values()
