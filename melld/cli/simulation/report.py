"""The text output of `melld simulate`: one column per policy, one line per figure, with units."""

from collections.abc import Callable, Sequence

from melld.decisions.records import encode
from melld.decisions.replay import Replayed
from melld.simulator.measures import ClassReport, Report
from melld.simulator.settings import SimulatorSettings

GIB = 2**30


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _figure(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.4f}"


LINES: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("GPUs, time-mean", lambda r: f"{r.mean_gpus:.2f}"),
    ("  lower bound", lambda r: f"{r.mean_bound:.2f}"),
    ("  ratio to the lower bound", lambda r: f"{r.ratio:.3f}"),
    ("GPUs, peak", lambda r: f"{r.peak_gpus}"),
    ("  lower bound", lambda r: f"{r.peak_bound}"),
    ("GPU-seconds", lambda r: f"{r.gpu_seconds:.0f}"),
    ("  least that any schedule needs", lambda r: f"{r.bound_gpu_seconds:.0f}"),
    ("requests served within both targets", lambda r: _share(r.attainment)),
    ("  first token in time", lambda r: _share(r.ttft_attainment)),
    ("  tokens at pace", lambda r: _share(r.itl_attainment)),
    ("  both, requests per GPU-second", lambda r: _figure(r.goodput_per_gpu_second)),
    ("GPU activations per hour", lambda r: f"{r.activations_per_h:.0f}"),
    ("KV utilisation of awake GPUs", lambda r: f"{r.utilisation:.1%}"),
    ("migrations per request", lambda r: f"{r.migrations_per_request:.3f}"),
    ("migrations per second", lambda r: f"{r.migrations_per_s:.3f}"),
    ("  as tokens", lambda r: f"{r.migrations - r.migrations_kv}"),
    ("  between machines", lambda r: f"{r.migrations_between_machines}"),
    ("  aborted", lambda r: f"{r.migrations_aborted}"),
    ("KV moved, GiB", lambda r: f"{r.bytes_moved / GIB:.1f}"),
    ("preemptions per request", lambda r: f"{r.preemptions_per_request:.3f}"),
    ("requests queued", lambda r: f"{r.queued}"),
    ("queueing delay, mean s", lambda r: f"{r.queueing_s.mean:.3f}"),
    ("  99th percentile", lambda r: f"{r.queueing_s.p99:.3f}"),
    ("time to first token, median s", lambda r: f"{r.ttft_s.p50:.3f}"),
    ("  99th percentile", lambda r: f"{r.ttft_s.p99:.3f}"),
    ("time between tokens, median ms", lambda r: f"{r.itl_s.p50 * 1e3:.1f}"),
    ("  99th percentile", lambda r: f"{r.itl_s.p99 * 1e3:.1f}"),
)


def table(reports: Sequence[Report], settings: SimulatorSettings) -> str:
    """Return a table of the reports side by side."""
    first = reports[0]
    tokens = settings.capacity_bytes // settings.bytes_per_token
    heading = (
        f"{first.requests} requests ({first.refused} refused) in {first.window_s:.0f} s, "
        f"GPUs of {settings.capacity_bytes / GIB:.2f} GiB KV ({tokens} tokens), seed {first.seed}"
    )
    label_width = max(len(label) for label, _ in LINES)
    widths = [max(len(report.policy), 10) for report in reports]
    rows = [heading, "", " " * label_width + _row([report.policy for report in reports], widths)]
    rows += [f"{label:<{label_width}}" + _row([show(report) for report in reports], widths) for label, show in LINES]
    if any(report.displaced for report in reports):
        rows += [f"{label:<{label_width}}" + _row([show(report) for report in reports], widths) for label, show in LOST]
    for name in first.by_class:
        rows.append(f"{name} priority")
        for label, show_class in CLASS_LINES:
            cells = [show_class(report.by_class[name]) for report in reports]
            rows.append(f"{'  ' + label:<{label_width}}" + _row(cells, widths))
    return "\n".join(rows)


LOST: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("requests of the lost machine", lambda r: f"{r.displaced}"),
    ("  resumed after, median s", lambda r: f"{r.displaced_s.p50:.3f}"),
    ("  99th percentile", lambda r: f"{r.displaced_s.p99:.3f}"),
)
CLASS_LINES: Sequence[tuple[str, Callable[[ClassReport], str]]] = (
    ("requests", lambda c: f"{c.requests}"),
    ("time to first token, median s", lambda c: f"{c.ttft_s.p50:.3f}"),
    ("  99th percentile", lambda c: f"{c.ttft_s.p99:.3f}"),
    ("time between tokens, mean ms", lambda c: f"{c.itl_s.mean * 1e3:.1f}"),
    ("until the last token, mean s", lambda c: f"{c.latency_s.mean:.3f}"),
)


def replay_text(result: Replayed) -> str:
    """Return the result of a replay, with the first difference if there is one."""
    done = f"{result.records} records, {result.events} events, {result.decisions} decisions of {result.policy}"
    if result.difference is None:
        return f"{done}: all match the log"
    logged, decided = (
        "nothing more" if record is None else encode(record).decode().strip()
        for record in (result.difference.logged, result.difference.decided)
    )
    first = f"the first difference is in step {result.difference.step}"
    return f"{done} agree; {first}:\n  logged   {logged}\n  decided  {decided}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
