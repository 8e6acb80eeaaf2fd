"""The table of workers, with as many columns as the terminal has room for, and each worker's bar of requests.

Owns which columns there are, and which go first; the bars' marks, and the letters and colours of the size classes.

    S■■■■■■T■■■■T■■■»t■t▪▪□□□···     a request begins with the letter of its class; » is moving away;
                                     ▪ other blocks in use; □ reserved for requests on their way here; · free
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from melld.cli.render import bar_cells, share_text, size_text
from melld.control.status import DaemonState, DaemonStatus, RequestStatus, WorkerState, WorkerStatus
from melld.scheduler.policies.mell.classes import TINY, L, Limits, M, S, T

UNBOUNDED_WIDTH = 10_000
UNKNOWN = "-"

STATE_STYLES: dict[str, str] = {
    DaemonState.READY: "green",
    DaemonState.STARTING: "yellow",
    DaemonState.DRAINING: "cyan",
    DaemonState.STOPPING: "cyan",
    WorkerState.DRAINED: "dim",
    WorkerState.LENT: "cyan",
    WorkerState.WAITING: "yellow",
    WorkerState.WAKING: "yellow",
    WorkerState.ASLEEP: "dim",
    WorkerState.DOZING: "dim",
    WorkerState.STOPPED: "dim",
    WorkerState.FAILED: "bold red",
}


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


class Column(NamedTuple):
    """A column of the table of workers; left out if it is empty for every worker."""

    title: str
    cell: Callable[[WorkerStatus], Text | str | None]
    right: bool = True


def worker_table(status: DaemonStatus, console: Console) -> RenderableType:
    """Return the table with the most detail that fits the console."""
    if not status.workers:
        return Text("No workers yet.", "dim")
    for detail in DETAILS:
        table = _laid_out(status, detail, ascii_only=console.options.ascii_only)
        if Measurement.get(console, console.options.update(width=UNBOUNDED_WIDTH), table).maximum <= console.width:
            break
    return table


def _laid_out(status: DaemonStatus, detail: Detail, *, ascii_only: bool) -> Table:
    table = plain_table(detail.gap)
    shown: list[list[Text | str]] = []
    columns = _columns(status.requests, detail, ascii_only=ascii_only)
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


def _columns(requests: tuple[RequestStatus, ...], detail: Detail, *, ascii_only: bool) -> list[Column]:
    held: dict[str | None, list[RequestStatus]] = {}
    for request in requests:
        held.setdefault(request.worker, []).append(request)

    def bar(worker: WorkerStatus) -> Text:
        if worker.capacity_bytes is None:
            return Text()
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
    if worker.capacity_bytes is None:
        return "no KV"
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


def plain_table(gap: int) -> Table:
    """Return an empty table without lines, with this padding between columns."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


# -- bars ------------------------------------------------------------------------------------------------------------

# Tiny requests form groups, each of which counts as one T: hence the small letter.
LETTERS = {TINY: "t", T: "T", S: "S", M: "M", L: "L"}
STYLES = {"t": "blue", "T": "green", "S": "cyan", "M": "yellow", "L": "magenta"}


class Marks(NamedTuple):
    """The character of each kind of cell."""

    held: str
    leaving: str
    other: str
    kept: str
    free: str


UNICODE = Marks("■", "»", "▪", "□", "·")
ASCII = Marks("#", ">", "=", "+", ".")


def class_letter(kv_bytes: int, capacity_bytes: int | None) -> str:
    """Return `t`, `T`, `S`, `M` or `L` (MELL, section VI), or "" if the size or the capacity is 0."""
    return LETTERS[Limits.of(capacity_bytes).class_of(kv_bytes)] if kv_bytes and capacity_bytes else ""


def worker_bar(worker: WorkerStatus, requests: Iterable[RequestStatus], cells: int, *, ascii_only: bool) -> Text:
    """Draw a worker in exactly `cells` characters: its requests, largest first, then other used, reserved, free blocks.

    Shared blocks count for each request that uses them, so the requests' sum is scaled down to the blocks in use.
    """
    marks = ASCII if ascii_only else UNICODE
    used, kept = bar_cells((worker.used_blocks, worker.reserved_blocks), worker.total_blocks, cells)
    held = sorted((one for one in requests if one.kv_bytes), key=lambda one: -one.kv_bytes)
    whole_bytes = max(worker.used_bytes, sum(one.kv_bytes for one in held))
    bar, so_far_bytes = Text(), 0
    for one in held:
        so_far_bytes += one.kv_bytes
        length = round(used * so_far_bytes / whole_bytes) - len(bar)
        if length > 0:
            letter = class_letter(one.kv_bytes, worker.capacity_bytes) or marks.held
            rest = (marks.leaving if one.moving_to else marks.held) * (length - 1)
            bar.append(letter + rest, STYLES.get(letter, "cyan"))
    bar.append(marks.other * (used - len(bar)), "cyan")
    bar.append(marks.kept * kept, "cyan")
    return bar.append(marks.free * (cells - used - kept), "dim")
