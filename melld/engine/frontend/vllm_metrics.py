"""vLLM's own metrics, in a process with several of its front ends.

vLLM's logger unregisters the metrics of earlier front ends (vllm.v1.metrics.prometheus), and one registry cannot hold
two of the same name.  Their series differ in the label `model_name`.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

PREFIX = "vllm:"


class VllmMetrics:
    """A collector of the metrics of all front ends.

    Register it; call `keep` after each front end is created, and `forget` once it is gone.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """`registry`: where vLLM registers its metrics."""
        self._registry = registry
        self._kept: dict[str, CollectorRegistry] = {}

    def forget(self, model: str) -> None:
        """Drop the metrics of this model's front end, if it had one."""
        self._kept.pop(model, None)

    def keep(self, model: str) -> None:
        """Move the metrics of the latest front end, which is this model's, out of the registry."""
        kept = CollectorRegistry()
        for collector in list(self._registry._collector_to_names):  # noqa: SLF001  as vLLM itself finds them
            if getattr(collector, "_name", "").startswith(PREFIX):
                self._registry.unregister(collector)
                kept.register(collector)
        self._kept[model] = kept

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names registered here could not be used by vLLM's next front end in the same registry."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the series of all front ends."""
        merged: dict[str, Metric] = {}
        for kept in self._kept.values():
            for family in kept.collect():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += family.samples
        yield from merged.values()
