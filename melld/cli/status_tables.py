"""The daemon's status as tables, for a terminal or a pipe.

Owns the layout.  Never asks the daemon.  On a terminal the tables keep the columns that fit its width, the most useful
first; in a pipe every row is one line with all columns, however long.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from melld.cli.render import duration_text, share_text, size_text
from melld.cli.status_bars import STYLES, class_letter, worker_bar
from melld.control.status import (
    DaemonState,
    DaemonStatus,
    LinkStatus,
    MoveStatus,
    RequestStatus,
    WorkerState,
    WorkerStatus,
    workers_ready,
)

UNBOUNDED_WIDTH = 10_000
UNKNOWN = "-"
MOST_MOVES = 8

STATE_STYLES: dict[str, str] = {
    DaemonState.READY: "green",
    DaemonState.STARTING: "yellow",
    DaemonState.DRAINING: "cyan",
    DaemonState.STOPPING: "cyan",
    WorkerState.DRAINED: "dim",
    WorkerState.WAKING: "yellow",
    WorkerState.ASLEEP: "dim",
    WorkerState.STOPPED: "dim",
    WorkerState.FAILED: "bold red",
}
PHASE_STYLES = {"queued": "yellow", "waiting": "yellow", "prefilling": "cyan", "decoding": ""}


class Detail(NamedTuple):
    """The level of detail of a table of workers."""

    bar_cells: int
    gap: int
    totals: bool = True
    """Show the device's total memory beside the used."""
    timing: bool = False
    names: bool = False
    climate: bool = False
    """Show temperature and utilisation."""


# From the most to the least detail: the first that fits is used.
DETAILS = (
    Detail(bar_cells=40, gap=2, timing=True, names=True, climate=True),
    Detail(bar_cells=20, gap=2, timing=True, names=True, climate=True),
    Detail(bar_cells=14, gap=2, timing=True, climate=True),
    Detail(bar_cells=12, gap=2, timing=True),
    Detail(bar_cells=10, gap=2),
    Detail(bar_cells=10, gap=2, totals=False),
    Detail(bar_cells=8, gap=1, totals=False),
    Detail(bar_cells=5, gap=1, totals=False),
)


class _OwnConsole(Console):
    """A console that lets the command handle a closed pipe; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_console() -> Console:
    """Return a console on standard output, with colours and a width limit on a terminal only."""
    width = None if sys.stdout.isatty() else UNBOUNDED_WIDTH
    return _OwnConsole(highlight=False, emoji=False, markup=False, width=width)


def status_view(status: DaemonStatus, console: Console, height: int | None = None) -> RenderableType:
    """Lay out the whole status; with a `height`, only as many requests as fit into that many lines."""
    parts = [_heading(status), _workers(status, console), *_remarks(status)]
    used = 1 + sum(len(console.render_lines(part)) for part in parts)
    return Group(*parts, Text(), *_requests(status, None if height is None else height - used))


def _heading(status: DaemonStatus) -> RenderableType:
    running = sum(worker.running_requests for worker in status.workers)
    rate = sum(worker.tokens_per_s for worker in status.workers)
    powers = [worker.power_w for worker in status.workers if worker.power_w is not None]
    first = Text.assemble(
        *_names(status),
        "  ",
        (status.state.value, STATE_STYLES[status.state]),
        f"  {status.url}",
    )
    about = (
        f"up {duration_text(status.uptime_s)}, policy {status.policy}, pid {status.pid}",
        f"melld {status.melld_version} on vLLM {status.vllm_version}",
    )
    now = [workers_ready(status.workers), f"{running} running", f"{status.queued_requests} queued"]
    now += [f"{rate:,.0f} tokens/s"] + ([f"{sum(powers):,.0f} W"] if powers else [])
    return Group(first, Text(", ".join(about), "dim"), Text(", ".join(now)), Text(_saved(status), "dim"), Text())


def _names(status: DaemonStatus) -> list[tuple[str, str]]:
    """Return the served models, each with its other names."""
    served = [model.names for model in status.served] or [status.models or (status.model,)]
    parts: list[tuple[str, str]] = []
    for name, *others in served:
        parts += [(", ", "dim")] * bool(parts) + [(name, "bold")]
        parts += [(f" ({', '.join(others)})", "dim")] if others else []
    return parts


def _saved(status: DaemonStatus) -> str:
    """Return one line on the worker-hours spent, and how many requests were served as promised."""
    awake_h, saved_h = status.worker_seconds_awake / 3600, status.gpu_hours_saved
    hours = f"awake {awake_h:.2f} worker-hours, asleep {saved_h:.2f}"
    service = status.service
    served = "" if service.attainment is None else f"; {service.attainment:.1%} of {service.requests:,} in time"
    return f"{hours}{served}; {status.preemptions} preemptions"


def _remarks(status: DaemonStatus) -> list[Text]:
    """Return the lines of text below the tables: reasons, warnings, moves."""
    remarks = [
        Text.assemble((f"{model.model}: ", "bold"), (model.reason, "red")) for model in status.served if model.reason
    ]
    remarks += [
        Text.assemble((f"{worker.worker}: ", "bold"), (said, "red" if failed else "dim"))
        for worker in status.workers
        if (said := "; ".join(filter(None, (worker.reason, _why(worker)))))
        for failed in [worker.state is WorkerState.FAILED]
    ]
    remarks += [Text(f"boundaries: {status.boundaries}", "dim")] if status.boundaries else []
    remarks += [Text(f"async scheduling: {said}", "dim")] if (said := status.async_scheduling) else []
    remarks += _tokens_only(status.links)
    remarks += [_move(move) for move in status.moves[:MOST_MOVES]]
    remarks += [Text(f"and {more} more moves", "dim")] if (more := len(status.moves) - MOST_MOVES) > 0 else []
    remarks += [Text(f"! {warning}", "yellow") for warning in status.warnings]
    return [Text(), *remarks] if remarks else []


def _why(worker: WorkerStatus) -> str:
    return f"class {worker.size_class}, {worker.why}" if worker.size_class else worker.why


def _tokens_only(links: Sequence[LinkStatus]) -> list[Text]:
    """Return a line for each reason why KV is not copied, with the links that it holds for."""
    concerned: dict[str, list[str]] = {}
    for link in links:
        if link.tokens_only_because:
            concerned.setdefault(link.tokens_only_because, []).append(f"{link.source} > {link.destination}")
    said = {why: ", ".join(ends) if len(ends) < len(links) else "all links" for why, ends in concerned.items()}
    return [Text.assemble((f"{ends}: ", "bold"), (f"tokens only: {why}", "yellow")) for why, ends in said.items()]


def _move(move: MoveStatus) -> Text:
    """Return one line: which request moves where, why, and how far the move is."""
    way = f"via {move.via}" if move.via else "deferred"
    waits = f": {move.deferred_because}" if move.deferred_because else ""
    what = f"{move.source} > {move.destination}, {size_text(move.kv_bytes)}, {move.cause}, {way}, {move.age_s:.1f} s"
    return Text.assemble((f"{move.request} ", "bold"), (f"{what}{waits}", "yellow" if waits else "dim"))


# -- workers ---------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table of workers; left out if it is empty for every worker."""

    title: str
    cell: Callable[[WorkerStatus], Text | str | None]
    right: bool = True


def _workers(status: DaemonStatus, console: Console) -> RenderableType:
    if not status.workers:
        return Text("No workers yet.", "dim")
    for detail in DETAILS:
        table = _worker_table(status, detail, ascii_only=console.options.ascii_only)
        if Measurement.get(console, console.options.update(width=UNBOUNDED_WIDTH), table).maximum <= console.width:
            break
    return table


def _worker_table(status: DaemonStatus, detail: Detail, *, ascii_only: bool) -> Table:
    table = _table(detail.gap)
    shown: list[list[Text | str]] = []
    columns = _worker_columns(status.requests, detail, ascii_only=ascii_only)
    if len(status.served) > 1:
        columns.insert(1, Column("Model", lambda worker: worker.model, right=False))
    for column in columns:
        cells = [column.cell(worker) for worker in status.workers]
        if any(cell is not None for cell in cells):
            table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
            shown.append([UNKNOWN if cell is None else cell for cell in cells])
    for row in zip(*shown, strict=True):
        table.add_row(*row)
    return table


def _worker_columns(requests: tuple[RequestStatus, ...], detail: Detail, *, ascii_only: bool) -> list[Column]:
    held: dict[str | None, list[RequestStatus]] = {}
    for request in requests:
        held.setdefault(request.worker, []).append(request)

    def bar(worker: WorkerStatus) -> Text:
        return worker_bar(worker, held.get(worker.worker, ()), detail.bar_cells, ascii_only=ascii_only)

    columns = [
        Column("Worker", lambda worker: worker.worker, right=False),
        Column("Device", lambda worker: _device(worker, named=detail.names), right=False),
        Column("State", lambda worker: Text(worker.state.value, STATE_STYLES[worker.state]), right=False),
        Column("KV", bar, right=False),
        Column("", _kv_share),
        Column("Reqs", _request_counts),
        Column("Tok/s", lambda worker: f"{worker.tokens_per_s:,.0f}"),
    ]
    if detail.timing:
        columns.append(Column("Step", lambda worker: _with_unit(worker.step_ms, ".1f", "ms")))
    columns.append(Column("Memory", lambda worker: _memory(worker, total=detail.totals)))
    columns.append(Column("Power", lambda worker: _with_unit(worker.power_w, ",.0f", "W")))
    if detail.climate:
        columns.append(Column("Temp", lambda worker: _with_unit(worker.temperature_c, "d", "C")))
        columns.append(Column("Util", lambda worker: _percent(worker.utilisation)))
    return columns


def _device(worker: WorkerStatus, *, named: bool) -> str:
    return f"{worker.device} {worker.device_name}" if named and worker.device_name else worker.device


def _kv_share(worker: WorkerStatus) -> str | None:
    """Return used and total KV, or None until the worker has been ready and its capacity is known."""
    return share_text(worker.used_bytes, worker.capacity_bytes) if worker.capacity_bytes else None


def _request_counts(worker: WorkerStatus) -> str | None:
    """Return `12/64`, or `12+3/64` if three requests wait on the worker itself."""
    if not worker.max_requests:
        return None
    waiting = f"+{worker.waiting_requests}" if worker.waiting_requests else ""
    return f"{worker.running_requests}{waiting}/{worker.max_requests}"


def _memory(worker: WorkerStatus, *, total: bool) -> str | None:
    if worker.memory_bytes is None:
        return None
    if total and worker.memory_total_bytes is not None:
        return share_text(worker.memory_bytes, worker.memory_total_bytes)
    return size_text(worker.memory_bytes)


def _with_unit(value: float | None, form: str, unit: str) -> str | None:
    return None if value is None else f"{value:{form}} {unit}"


def _percent(part: float | None) -> str | None:
    return None if part is None else f"{part:.0%}"


# -- requests --------------------------------------------------------------------------------------------------------


def _requests(status: DaemonStatus, lines: int | None) -> list[RenderableType]:
    """Return the table of requests in at most `lines` lines, and a line that counts those that did not fit."""
    if not status.requests:
        return [Text("No requests.", "dim")]
    shown = status.requests
    if lines is not None and len(shown) + 1 > lines:
        shown = shown[: max(lines - 2, 0)]
    hidden = len(status.requests) - len(shown)
    rest = [Text(f"and {hidden} more", "dim")] if hidden else []
    capacities = {worker.worker: worker.capacity_bytes for worker in status.workers}
    return [_request_table(shown, capacities), *rest] if shown else [Text(f"{hidden} requests", "dim")]


def _request_table(requests: tuple[RequestStatus, ...], capacities: dict[str, int]) -> Table:
    table = _table(gap=2)
    # The one column that shrinks on a narrow terminal: the beginning of an id tells it from others.
    table.add_column("Request", overflow="ellipsis", min_width=12)
    for title in ("Worker", "Class", "Phase"):
        table.add_column(title, no_wrap=True)
    moved = any(request.moves for request in requests)
    for title in ("Prompt", "Output", "KV", "Age", *(("Moves",) if moved else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for request in requests:
        phase = "queued" if request.worker is None else request.phase.value
        where = f"{request.worker}>{request.moving_to}" if request.moving_to else request.worker or UNKNOWN
        where += " pinned" if request.pinned else ""
        letter = class_letter(request.kv_bytes, capacities.get(request.worker or "", 0))
        size_class = Text(letter or UNKNOWN, STYLES.get(letter, "dim"))
        cells: list[Text | str] = [request.request, where, size_class, Text(phase, PHASE_STYLES[phase])]
        cells += [f"{request.prompt_tokens:,}", f"{request.output_tokens:,}", size_text(request.kv_bytes)]
        cells += [duration_text(request.age_s), *((str(request.moves),) if moved else ())]
        table.add_row(*cells)
    return table


# -- models ----------------------------------------------------------------------------------------------------------


def model_table(status: DaemonStatus) -> Table:
    """Return the served models, one a row."""
    table = _table(gap=2)
    for title in ("Model", "State", "Workers", "Requests", "Also called"):
        table.add_column(title, no_wrap=title != "Also called")
    for model in status.served:
        workers = ", ".join(one.worker for one in status.workers if one.model == model.model and one.pid is not None)
        requests = sum(one.model == model.model for one in status.requests)
        said = "; ".join(filter(None, (", ".join(model.names[1:]), model.reason)))
        table.add_row(model.model, model.state.value, workers or UNKNOWN, str(requests), said)
    return table


def _table(gap: int) -> Table:
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
