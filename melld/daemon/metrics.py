"""The daemon's own metrics for Prometheus, from its status and its counters."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from melld.control.status import SERVING, DaemonStatus, MovingState
from melld.daemon.attainment import Attainment
from melld.daemon.watch import Watch
from melld.driver.queue import RequestQueue
from melld.engine.fleet.reports import Reports


class Metrics:
    """A collector for prometheus_client's registry."""

    def __init__(self, watch: Watch, queue: RequestQueue, reports: Reports, attainment: Attainment) -> None:
        self._watch = watch
        self._queue = queue
        self._reports = reports
        self._attainment = attainment

    def collect(self) -> Iterator[Metric]:
        """Yield the `melld_*` metrics, for prometheus_client's registry."""
        status = self._watch.status()
        yield _gauge("melld_requests_queued", "Requests that no worker has room for yet.", status.queued_requests)
        yield self._queue.collect()
        yield _gauge("melld_requests", "Requests that have not ended.", len(status.requests))
        yield _gauge("melld_ready", "1 while requests are served.", float(self._watch.why_not_ready() is None))
        yield from self._savings(status)
        dropped = "Outputs of a worker that does not own the request."
        yield _counter("melld_dropped_outputs", dropped, self._reports.dropped_outputs)
        for field, (name, text, kind) in WORKER_METRICS.items():
            family = kind(name, text, labels=["worker", "device"])
            for worker in status.workers:
                value = getattr(worker, field)
                if value is not None:
                    family.add_metric([worker.worker, worker.device], float(value))
            yield family
        up = GaugeMetricFamily("melld_worker_ready", "1 while it serves, or is woken to.", labels=["worker", "device"])
        for worker in status.workers:
            up.add_metric([worker.worker, worker.device], float(worker.state in SERVING))
        yield up

    def _savings(self, status: DaemonStatus) -> Iterator[Metric]:
        served = self._attainment
        for name, text, count in (
            ("melld_preemptions", "Requests that a worker preempted for lack of blocks.", status.preemptions),
            ("melld_worker_awake_seconds", "Seconds that workers were awake, summed.", status.worker_seconds_awake),
            ("melld_requests_judged", "Requests that ended, or were sent away for want of room.", served.judged),
            ("melld_requests_attained", "Those whose first token and pace were in time.", served.attained),
            ("melld_requests_first_token_in_time", "Those whose first token was in time.", served.in_time),
            ("melld_requests_in_pace", "Those whose tokens kept pace.", served.in_pace),
        ):
            yield _counter(name, text, count)
        yield _gauge("melld_gpu_hours_saved", "Hours that workers slept, summed.", status.gpu_hours_saved)
        for state in MovingState:
            moves = sum(move.state is state for move in status.moves)
            yield _gauge(f"melld_moves_{state}", f"Moves that are {state} now.", moves)


WORKER_METRICS = {
    "capacity_bytes": ("melld_worker_kv_capacity_bytes", "Bytes of the worker's KV blocks.", GaugeMetricFamily),
    "used_bytes": ("melld_worker_kv_used_bytes", "Bytes of its KV blocks in use.", GaugeMetricFamily),
    "running_requests": ("melld_worker_requests_running", "Requests in its steps.", GaugeMetricFamily),
    "waiting_requests": ("melld_worker_requests_waiting", "Requests that it has not started.", GaugeMetricFamily),
    "tokens_per_s": ("melld_worker_output_tokens_per_second", "Over the last seconds.", GaugeMetricFamily),
    "restarts": ("melld_worker_restarts", "Starts of its process after the first.", CounterMetricFamily),
    "memory_bytes": ("melld_device_memory_used_bytes", "Memory of the device in use.", GaugeMetricFamily),
    "memory_total_bytes": ("melld_device_memory_total_bytes", "Memory of the device.", GaugeMetricFamily),
    "power_w": ("melld_device_power_watts", "Power that the device draws.", GaugeMetricFamily),
    "temperature_c": ("melld_device_temperature_celsius", "The device's temperature.", GaugeMetricFamily),
    "utilisation": ("melld_device_utilisation_ratio", "Part of the time with work.", GaugeMetricFamily),
}


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, count: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text)
    family.add_metric([], count)
    return family
