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

INTERVAL_S = 0.01
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
        text = "Requests that ended before they started, for lack of room."
        yield _family(CounterMetricFamily, "melld_requests_sent_away", text, ("cause", "model"), sent_away)
        yield self._by_tier(status.requests)
        by_model = [(one.name, one.parts.history.use.by_client) for one in self._models]
        for field, (name, text) in CLIENT_COUNTS.items():
            counts = {(client, model): getattr(use, field) for model, uses in by_model for client, use in uses.items()}
            yield _family(CounterMetricFamily, name, text, ("client", "model"), counts)
        is_ready = {(): self._watch.why_not_ready() is None}
        yield _family(GaugeMetricFamily, "melld_ready", "1 while requests are served.", (), is_ready)
        for state in MovingState:
            moves = {(): sum(move.state is state for move in status.moves)}
            yield _family(GaugeMetricFamily, f"melld_moves_{state}", f"Moves that are {state} now.", (), moves)
        workers = {(one.worker, one.device, one.model): one for one in status.workers}
        for field, (name, text, kind) in WORKER_METRICS.items():
            known = {key: value for key, one in workers.items() if (value := getattr(one, field)) is not None}
            yield _family(kind, name, text, WORKER_LABELS, known)
        serving = {key: one.state in SERVING for key, one in workers.items()}
        text = "1 while the worker serves or can be woken."
        yield _family(GaugeMetricFamily, "melld_worker_ready", text, WORKER_LABELS, serving)
        up = {(one.machine,): not one.reason for one in status.machines}
        yield _family(GaugeMetricFamily, "melld_machine_up", "1 while the machine is connected.", ("machine",), up)
        text = "Times that a task of the daemon was started again after a failure, which is a bug in melld."
        restarts = {(task,): count for task, count in self._watch.task_restarts.items()}
        yield _family(CounterMetricFamily, "melld_task_restarts", text, ("task",), restarts)
        yield from self._of_devices(status.devices)

    def _of_devices(self, devices: Sequence[DeviceStatus]) -> Iterator[Metric]:
        """Yield what several models have of the devices that they share; nothing with one model."""
        for field, (name, text) in TENANT_METRICS.items():
            values = {(device.device, one.model): getattr(one, field) for device in devices for one in device.models}
            yield _family(GaugeMetricFamily, name, text, ("device", "model"), values)
        free = {(device.device,): device.free_bytes for device in devices}
        text = "KV memory that no model was granted."
        yield _family(GaugeMetricFamily, "melld_device_kv_free_bytes", text, ("device",), free)
        shell = self._landlord
        counts = shell.loads, shell.courier.takes, shell.courier.moved_blocks
        for (name, text), count in zip(LANDLORD_COUNTS, counts, strict=True):
            yield _family(CounterMetricFamily, name, text, ("model",), {(model,): n for model, n in count.items()})

    def _by_tier(self, requests: Sequence[RequestStatus]) -> Metric:
        """Return how many requests of each tier run and wait, those that wait on a worker included."""
        text = "Requests that have not ended, by tier: running, or waiting for room or for their worker."
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
    suspended = "Requests that gave up their worker to an urgent one, to resume later."
    judged = "Requests that ended, or were sent away for want of room."
    attained = "Judged requests whose first token and pace were in time."
    in_time = "Judged requests whose first token was in time."
    lent = "Seconds for which workers' devices were lent (`melld run`), summed."
    awake_s, known_s = parts.history.worker_seconds()
    return (
        Figure(gauge, "melld_requests_queued", "Requests that no worker has room for yet.", queued),
        Figure(gauge, "melld_requests", "Requests that have not ended.", len(live)),
        Figure(counter, "melld_dropped_outputs", "Outputs of a worker that does not own the request.", dropped),
        Figure(counter, "melld_preemptions", "Requests that a worker preempted for lack of blocks.", preempted),
        Figure(counter, "melld_suspensions", suspended, parts.driver.suspensions),
        Figure(counter, "melld_worker_awake_seconds", "Seconds that workers were awake, summed.", awake_s),
        Figure(gauge, "melld_gpu_hours_saved", "Hours that workers slept, summed.", (known_s - awake_s) / 3600),
        Figure(counter, "melld_loans", "Loans of devices (`melld run`) begun.", parts.driver.loans.count),
        Figure(counter, "melld_lent_seconds", lent, parts.driver.loans.lent_s()),
        Figure(counter, "melld_requests_judged", judged, service.judged),
        Figure(counter, "melld_requests_attained", attained, service.attained),
        Figure(counter, "melld_requests_first_token_in_time", in_time, service.in_time),
        Figure(counter, "melld_requests_in_pace", "Judged requests that kept pace.", service.in_pace),
    )


CLIENT_COUNTS = {
    "requests": ("melld_client_requests", "The client's requests that a worker got, and that have ended."),
    "prompt_tokens": ("melld_client_prompt_tokens", "Tokens of their prompts, for each choice."),
    "output_tokens": ("melld_client_output_tokens", "Tokens that they were answered with."),
}
TENANT_METRICS = {
    "granted_bytes": ("melld_model_kv_granted_bytes", "KV memory of a shared device that the model may use."),
    "resident_bytes": ("melld_model_resident_bytes", "Memory that the model holds on a shared device, besides KV."),
}
LANDLORD_COUNTS = (
    ("melld_model_loads", "Loads of the model on a shared device."),
    ("melld_kv_takes", "Times that KV memory was asked back from the model."),
    ("melld_kv_moved_blocks", "Blocks of the model's requests that were moved to give KV memory back."),
)
WORKER_LABELS = ("worker", "device", "model")
WORKER_METRICS = {
    "capacity_bytes": ("melld_worker_kv_capacity_bytes", "Bytes of the worker's KV blocks.", GaugeMetricFamily),
    "used_bytes": ("melld_worker_kv_used_bytes", "Bytes of the worker's KV blocks in use.", GaugeMetricFamily),
    "running_requests": ("melld_worker_requests_running", "Requests in the worker's steps.", GaugeMetricFamily),
    "waiting_requests": ("melld_worker_requests_waiting", "Requests not started there yet.", GaugeMetricFamily),
    "tokens_per_s": ("melld_worker_output_tokens_per_second", "Output tokens, lately.", GaugeMetricFamily),
    "restarts": ("melld_worker_restarts", "Starts of the worker's process after the first.", CounterMetricFamily),
    "memory_bytes": ("melld_device_memory_used_bytes", "Memory of the device in use.", GaugeMetricFamily),
    "memory_total_bytes": ("melld_device_memory_total_bytes", "Memory of the device.", GaugeMetricFamily),
    "power_w": ("melld_device_power_watts", "Power that the device draws.", GaugeMetricFamily),
    "temperature_c": ("melld_device_temperature_celsius", "The device's temperature.", GaugeMetricFamily),
    "utilisation": ("melld_device_utilisation_ratio", "Busy part of the time.", GaugeMetricFamily),
}


class LoopProbe:
    """A timer that measures its own lateness, which delays every token of every stream.

    It samples the running loop every `INTERVAL_S` until `stop`, which costs about ten microseconds each time.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._delays = Histogram(
            "melld_event_loop_delay_seconds",
            "How late timers of the daemon's event loop fire",
            buckets=BUCKETS,
            registry=registry,
        )
        gauge = Gauge(
            "melld_event_loop_delay_max_seconds",
            "The longest delay of the daemon's event loop in the last one to two minutes",
            registry=registry,
        )
        gauge.set_function(self.max_delay_s)
        tasks = Gauge(
            "melld_event_loop_tasks", "Tasks of the daemon's event loop that have not ended", registry=registry
        )
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
