"""The daemon's own metrics for Prometheus, from its status and its counters, and how late its event loop runs."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from melld.control.status import SERVING, DeviceStatus, MovingState, RequestStatus
from melld.daemon.model import ModelParts, ServedModel
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.watch import Watch
from melld.migrate.snapshot import Phase
from melld.scheduler.priorities import Tier

INTERVAL_S = 0.05
"""Each look may wake the process, which costs more than the look."""
WINDOW_S = 60.0
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """A collector for prometheus_client's registry."""

    def __init__(self, watch: Watch, models: Sequence[ServedModel], landlord: LandlordShell) -> None:
        self._landlord = landlord
        self._watch = watch
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the `melld_*` metrics, for prometheus_client's registry."""
        status = self._watch.status()
        for each in zip(*(_figures(one.parts) for one in self._models), strict=True):
            values = {(model.name,): figure.value for model, figure in zip(self._models, each, strict=True)}
            yield _family(each[0].kind, each[0].name, each[0].text, ("model",), values)
        queues = [(one.name, one.parts.driver.queue) for one in self._models]
        sent_away = {(cause, name): count for name, queue in queues for cause, count in queue.sent_away.items()}
        text = "Requests rejected before they started, for lack of capacity."
        yield _family(CounterMetricFamily, "melld_requests_sent_away", text, ("cause", "model"), sent_away)
        yield self._by_tier(status.requests)
        by_model = [(one.name, one.parts.history.use.by_client) for one in self._models]
        for field, (name, text) in CLIENT_COUNTS.items():
            counts = {(client, model): getattr(use, field) for model, uses in by_model for client, use in uses.items()}
            yield _family(CounterMetricFamily, name, text, ("client", "model"), counts)
        is_ready = {(): self._watch.why_not_ready() is None}
        yield _family(GaugeMetricFamily, "melld_ready", "1 while requests can be served.", (), is_ready)
        for state in MovingState:
            moves = {(): sum(move.state is state for move in status.moves)}
            yield _family(GaugeMetricFamily, f"melld_moves_{state}", f"Moves that are {state} now.", (), moves)
        workers = {(one.worker, one.device, one.model): one for one in status.workers}
        for field, (name, text, kind) in WORKER_METRICS.items():
            known = {key: value for key, one in workers.items() if (value := getattr(one, field)) is not None}
            yield _family(kind, name, text, WORKER_LABELS, known)
        serving = {key: one.state in SERVING for key, one in workers.items()}
        text = "1 while the worker is serving or can be woken."
        yield _family(GaugeMetricFamily, "melld_worker_ready", text, WORKER_LABELS, serving)
        up = {(one.machine,): not one.reason for one in status.machines}
        yield _family(GaugeMetricFamily, "melld_machine_up", "1 while the machine is connected.", ("machine",), up)
        text = "Restarts of daemon tasks after a failure, which is a bug in melld."
        restarts = {(task,): count for task, count in self._watch.task_restarts.items()}
        yield _family(CounterMetricFamily, "melld_task_restarts", text, ("task",), restarts)
        yield from self._of_devices(status.devices)

    def _of_devices(self, devices: Sequence[DeviceStatus]) -> Iterator[Metric]:
        """Yield each model's share of the shared devices; nothing with one model."""
        for field, (name, text) in TENANT_METRICS.items():
            values = {(device.device, one.model): getattr(one, field) for device in devices for one in device.models}
            yield _family(GaugeMetricFamily, name, text, ("device", "model"), values)
        free = {(device.device,): device.free_bytes for device in devices}
        text = "KV memory not granted to any model."
        yield _family(GaugeMetricFamily, "melld_device_kv_free_bytes", text, ("device",), free)
        for field, (name, text) in LANDLORD_COUNTS.items():
            counts = {(one.name,): getattr(one, field) for one in self._landlord.tenants.values()}
            yield _family(CounterMetricFamily, name, text, ("model",), counts)

    def _by_tier(self, requests: Sequence[RequestStatus]) -> Metric:
        """Return how many requests of each tier run and wait, including those queued on a worker."""
        text = "Unfinished requests by tier: running, or waiting for capacity or for their worker."
        counts = Counter((one.tier, _STATES[one.phase is Phase.WAITING], one.model) for one in requests)
        keys = itertools.product(Tier, _STATES, (model.name for model in self._models))
        labels = ("tier", "state", "model")
        return _family(GaugeMetricFamily, "melld_requests_by_tier", text, labels, {key: counts[key] for key in keys})


def _family(
    kind: Callable[..., Any], name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]
) -> Metric:
    """Return a metric with its values, each by the values of its labels."""
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    assert isinstance(family, Metric)
    return family


_STATES = ("running", "waiting")


class Figure(NamedTuple):
    """A metric of one model."""

    kind: Callable[..., Any]
    name: str
    text: str
    value: float


def _figures(parts: ModelParts) -> tuple[Figure, ...]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    live, service, preempted = parts.fleet.live, parts.history.attainment, parts.driver.news.preemptions
    queued, dropped = sum(one.worker is None for one in live.values()), parts.fleet.reports.dropped_outputs
    suspended = "Suspensions of requests for more urgent ones."
    judged = "Requests that finished or were rejected for lack of capacity."
    attained = "Judged requests that met both latency targets."
    in_time = "Judged requests that met the target for time to first token."
    lent = "Total seconds that workers' devices were lent (`melld run`)."
    awake_s, known_s = parts.history.worker_seconds()
    loans, drains = parts.driver.loans, parts.driver.drains
    return (
        Figure(gauge, "melld_requests_queued", "Requests queued because no worker has room.", queued),
        Figure(gauge, "melld_requests", "Unfinished requests.", len(live)),
        Figure(
            counter, "melld_dropped_outputs", "Outputs dropped because the worker does not own the request.", dropped
        ),
        Figure(counter, "melld_preemptions", "Preemptions of requests for lack of blocks.", preempted),
        Figure(counter, "melld_suspensions", suspended, parts.driver.suspensions),
        Figure(counter, "melld_worker_awake_seconds", "Total seconds that workers were awake.", awake_s),
        Figure(gauge, "melld_gpu_hours_saved", "Total hours that workers slept.", (known_s - awake_s) / 3600),
        Figure(counter, "melld_loans", "Device loans started (`melld run`).", loans.count[drains]),
        Figure(counter, "melld_lent_seconds", lent, loans.lent_s(drains)),
        Figure(counter, "melld_requests_judged", judged, service.judged),
        Figure(counter, "melld_requests_attained", attained, service.attained),
        Figure(counter, "melld_requests_first_token_in_time", in_time, service.in_time),
        Figure(
            counter,
            "melld_requests_in_pace",
            "Judged requests that met the target for time between tokens.",
            service.in_pace,
        ),
    )


CLIENT_COUNTS = {
    "requests": ("melld_client_requests", "The client's finished requests that reached a worker."),
    "prompt_tokens": ("melld_client_prompt_tokens", "Prompt tokens of those requests, counted per choice."),
    "output_tokens": ("melld_client_output_tokens", "Output tokens of those requests."),
}
TENANT_METRICS = {
    "granted_bytes": ("melld_model_kv_granted_bytes", "KV memory of a shared device that the model may use."),
    "resident_bytes": ("melld_model_resident_bytes", "Memory that the model takes on a shared device, besides KV."),
}
LANDLORD_COUNTS = {
    "loads": ("melld_model_loads", "Loads of the model on a shared device."),
    "takes": ("melld_kv_takes", "Times that KV memory was reclaimed from the model."),
    "moved_blocks": ("melld_kv_moved_blocks", "Blocks of the model's requests moved to reclaim KV memory."),
}
WORKER_LABELS = ("worker", "device", "model")
WORKER_METRICS = {
    "capacity_bytes": ("melld_worker_kv_capacity_bytes", "Bytes of the worker's KV blocks.", GaugeMetricFamily),
    "used_bytes": ("melld_worker_kv_used_bytes", "Bytes of the worker's KV blocks in use.", GaugeMetricFamily),
    "running_requests": ("melld_worker_requests_running", "Requests running on the worker.", GaugeMetricFamily),
    "waiting_requests": ("melld_worker_requests_waiting", "Requests waiting on the worker.", GaugeMetricFamily),
    "tokens_per_s": ("melld_worker_output_tokens_per_second", "Recent output tokens per second.", GaugeMetricFamily),
    "restarts": ("melld_worker_restarts", "Restarts of the worker's process.", CounterMetricFamily),
    "memory_bytes": ("melld_device_memory_used_bytes", "Device memory in use.", GaugeMetricFamily),
    "memory_total_bytes": ("melld_device_memory_total_bytes", "Total device memory.", GaugeMetricFamily),
    "power_w": ("melld_device_power_watts", "Device power draw.", GaugeMetricFamily),
    "temperature_c": ("melld_device_temperature_celsius", "Device temperature.", GaugeMetricFamily),
    "utilisation": ("melld_device_utilisation_ratio", "Fraction of time the device is busy.", GaugeMetricFamily),
}


class LoopProbe:
    """A timer that measures its own lateness, which delays every token of every stream.

    It samples the running loop every `INTERVAL_S` until `stop`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._delays = Histogram(
            "melld_event_loop_delay_seconds",
            "Delay of timers on the daemon's event loop",
            buckets=BUCKETS,
            registry=registry,
        )
        gauge = Gauge(
            "melld_event_loop_delay_max_seconds",
            "Longest delay of the daemon's event loop in the last one to two minutes",
            registry=registry,
        )
        gauge.set_function(self.max_delay_s)
        tasks = Gauge("melld_event_loop_tasks", "Unfinished tasks on the daemon's event loop", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks(self._loop)))
        self._loop = asyncio.get_running_loop()
        self._window_ends = self._loop.time() + WINDOW_S
        self._worst_s = self._worst_before_s = 0.0
        self._timer = self._armed()

    def stop(self) -> None:
        """Stop sampling."""
        self._timer.cancel()

    def max_delay_s(self) -> float:
        """Return the longest delay of this window of a minute and the one before it."""
        return max(self._worst_s, self._worst_before_s)

    def _armed(self) -> asyncio.TimerHandle:
        due = self._loop.time() + INTERVAL_S
        return self._loop.call_at(due, self._fired, due)

    def _fired(self, due: float) -> None:
        now = self._loop.time()
        delay_s = max(0.0, now - due)
        self._delays.observe(delay_s)
        if now >= self._window_ends:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends = now + WINDOW_S
        self._worst_s = max(self._worst_s, delay_s)
        self._timer = self._armed()
