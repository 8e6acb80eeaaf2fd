"""The daemon's own metrics for Prometheus, from its status and its counters, and how late its event loop runs."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from melld.control.status import SERVING, DeviceStatus, MovingState, RequestStatus, Tier
from melld.daemon.landlord import LandlordShell
from melld.daemon.model import ServedModel
from melld.daemon.watch import Watch
from melld.migrate.snapshot import Phase

INTERVAL_S = 0.01
WINDOW_S = 60.0
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """A collector for prometheus_client's registry."""

    def __init__(self, watch: Watch, models: Sequence[ServedModel], landlord: LandlordShell | None = None) -> None:
        self._landlord = landlord
        self._watch = watch
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the `melld_*` metrics, for prometheus_client's registry."""
        status = self._watch.status()
        yield self._by_model(
            GaugeMetricFamily,
            "melld_requests_queued",
            "Requests that no worker has room for yet.",
            lambda one: sum(live.worker is None for live in one.parts.fleet.live.values()),
        )
        yield self._sent_away()
        yield self._by_tier(status.requests)
        yield self._by_model(
            GaugeMetricFamily, "melld_requests", "Requests that have not ended.", lambda one: len(one.parts.fleet.live)
        )
        ready = GaugeMetricFamily("melld_ready", "1 while requests are served.")
        ready.add_metric([], float(self._watch.why_not_ready() is None))
        yield ready
        for name, text, count in COUNTS:
            yield self._by_model(CounterMetricFamily, name, text, count)
        yield self._by_model(GaugeMetricFamily, "melld_gpu_hours_saved", "Hours that workers slept, summed.", _saved_h)
        for state in MovingState:
            moves = GaugeMetricFamily(f"melld_moves_{state}", f"Moves that are {state} now.")
            moves.add_metric([], sum(move.state is state for move in status.moves))
            yield moves
        for field, (name, text, kind) in WORKER_METRICS.items():
            family = kind(name, text, labels=WORKER_LABELS)
            for worker in status.workers:
                value = getattr(worker, field)
                if value is not None:
                    family.add_metric([worker.worker, worker.device, worker.model], float(value))
            yield family
        up = GaugeMetricFamily("melld_worker_ready", "1 while the worker serves or can be woken.", labels=WORKER_LABELS)
        for worker in status.workers:
            up.add_metric([worker.worker, worker.device, worker.model], float(worker.state in SERVING))
        yield up
        machines = GaugeMetricFamily("melld_machine_up", "1 while the machine is connected.", labels=["machine"])
        for machine in status.machines:
            machines.add_metric([machine.machine], float(not machine.reason))
        yield machines
        yield from self._of_devices(status.devices)

    def _of_devices(self, devices: Sequence[DeviceStatus]) -> Iterator[Metric]:
        """Yield what several models have of the devices that they share; nothing with one model."""
        for field, (name, text) in TENANT_METRICS.items():
            family = GaugeMetricFamily(name, text, labels=["device", "model"])
            for device in devices:
                for tenant in device.models:
                    family.add_metric([device.device, tenant.model], getattr(tenant, field))
            yield family
        free = GaugeMetricFamily(
            "melld_device_kv_free_bytes", "KV memory that no model was granted.", labels=["device"]
        )
        for device in devices:
            free.add_metric([device.device], device.free_bytes)
        yield free
        shell = self._landlord
        counts = (shell.loads, shell.courier.takes, shell.courier.moved_blocks) if shell is not None else ({}, {}, {})
        for (name, text), count in zip(LANDLORD_COUNTS, counts, strict=True):
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, value in count.items():
                counter.add_metric([model], value)
            yield counter

    def _by_model(
        self, kind: Callable[..., Any], name: str, text: str, count: Callable[[ServedModel], float]
    ) -> Metric:
        family = kind(name, text, labels=["model"])
        for model in self._models:
            family.add_metric([model.name], count(model))
        assert isinstance(family, Metric)
        return family

    def _by_tier(self, requests: Sequence[RequestStatus]) -> Metric:
        """Return how many requests of each tier run and wait, those that wait on a worker included."""
        text = "Requests that have not ended, by tier: running, or waiting for room or for their worker."
        family = GaugeMetricFamily("melld_requests_by_tier", text, labels=["tier", "state", "model"])
        counts = Counter((one.tier, _STATES[one.phase is Phase.WAITING], one.model) for one in requests)
        for key in itertools.product(Tier, _STATES, (model.name for model in self._models)):
            family.add_metric(list(key), counts[key])
        return family

    def _sent_away(self) -> Metric:
        text = "Requests that ended before they started, for lack of room."
        family = CounterMetricFamily("melld_requests_sent_away", text, labels=["cause", "model"])
        for model in self._models:
            for reason, count in model.parts.driver.queue.sent_away.items():
                family.add_metric([reason, model.name], count)
        return family


_STATES = ("running", "waiting")


def _saved_h(model: ServedModel) -> float:
    seconds = model.parts.history.worker_seconds()
    return (seconds.known - seconds.awake) / 3600


COUNTS: tuple[tuple[str, str, Callable[[ServedModel], float]], ...] = (
    (
        "melld_dropped_outputs",
        "Outputs of a worker that does not own the request.",
        lambda one: one.parts.fleet.reports.dropped_outputs,
    ),
    (
        "melld_preemptions",
        "Requests that a worker preempted for lack of blocks.",
        lambda one: one.parts.driver.news.preemptions,
    ),
    (
        "melld_suspensions",
        "Requests that gave up their worker to an urgent one, to resume later.",
        lambda one: one.parts.driver.suspensions,
    ),
    (
        "melld_worker_awake_seconds",
        "Seconds that workers were awake, summed.",
        lambda one: one.parts.history.worker_seconds().awake,
    ),
    (
        "melld_requests_judged",
        "Requests that ended, or were sent away for want of room.",
        lambda one: one.parts.history.attainment.judged,
    ),
    (
        "melld_requests_attained",
        "Judged requests whose first token and pace were in time.",
        lambda one: one.parts.history.attainment.attained,
    ),
    (
        "melld_requests_first_token_in_time",
        "Judged requests whose first token was in time.",
        lambda one: one.parts.history.attainment.in_time,
    ),
    ("melld_requests_in_pace", "Judged requests that kept pace.", lambda one: one.parts.history.attainment.in_pace),
)
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

    A sample costs about ten microseconds.  Call `start` and `stop` on the loop that it watches.
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
        tasks.set_function(self.tasks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._window_ends = 0.0
        self._worst_s = 0.0
        self._worst_before_s = 0.0

    def start(self) -> None:
        """Start to sample every INTERVAL_S."""
        loop = self._loop = asyncio.get_running_loop()
        self._window_ends = loop.time() + WINDOW_S
        self._arm(loop)

    def stop(self) -> None:
        """Stop sampling; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def max_delay_s(self) -> float:
        """Return the longest delay of this window of a minute and the one before it."""
        return max(self._worst_s, self._worst_before_s)

    def tasks(self) -> int:
        """Return the number of unfinished tasks; 0 before `start`."""
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(due, self._fired, loop, due)

    def _fired(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        delay_s = max(0.0, now - due)
        self._delays.observe(delay_s)
        if now >= self._window_ends:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends = now + WINDOW_S
        self._worst_s = max(self._worst_s, delay_s)
        self._arm(loop)
