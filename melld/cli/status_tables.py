"""The daemon's status as tables, for a terminal or a pipe.

Owns the layout.  Never asks the daemon.  On a terminal the tables keep the columns that fit its width, the most useful
first; in a pipe every row is one line with all columns, however long.
"""

import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from melld.cli.render import bar_cells, duration_text, size_text
from melld.cli.worker_table import (
    ASCII,
    STATE_STYLES,
    STYLES,
    UNBOUNDED_WIDTH,
    UNICODE,
    UNKNOWN,
    class_letter,
    plain_table,
    worker_table,
)
from melld.control.status import (
    DaemonStatus,
    LinkStatus,
    MoveStatus,
    RequestStatus,
    WorkerState,
    WorkerStatus,
    workers_ready,
)
from melld.scheduler.priorities import Tier

MOST_MOVES = 8
DEVICE_BAR_CELLS = 24

TIER_STYLES = {Tier.PRIORITY: "bold", Tier.DEFAULT: "", Tier.FLEX: "dim"}
PHASE_STYLES = {"queued": "yellow", "waiting": "yellow", "prefilling": "cyan", "decoding": ""}


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
    parts = [_heading(status), worker_table(status, console), *_remarks(status)]
    if status.devices:
        parts.insert(2, Group(Text(), device_table(status, ascii_only=console.options.ascii_only)))
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
    suspensions = f", {status.suspensions} suspensions" if status.suspensions else ""
    return f"{hours}{served}; {status.preemptions} preemptions{suspensions}"


def _remarks(status: DaemonStatus) -> list[Text]:
    """Return the lines of text below the tables: reasons, warnings, moves."""
    remarks = [
        Text.assemble((f"{model.model}: ", "bold"), (model.reason, "red")) for model in status.served if model.reason
    ]
    remarks += [
        Text.assemble((f"machine {machine.machine}: ", "bold"), (f"lost, {machine.reason}", "red"))
        for machine in status.machines
        if machine.reason
    ]
    remarks += [
        Text.assemble((f"{worker.worker}: ", "bold"), (said, "red" if failed else "dim"))
        for worker in status.workers
        if (said := "; ".join(filter(None, (worker.reason, _why(worker)))))
        for failed in [worker.state is WorkerState.FAILED]
    ]
    remarks += [Text(f"renewal: {status.renewal}")] if status.renewal else []
    remarks += [Text(f"boundaries: {status.boundaries}", "dim")] if status.boundaries else []
    remarks += [Text(f"roles: {status.roles}", "dim")] if status.roles else []
    remarks += [Text(f"async scheduling: {said}", "dim")] if (said := status.async_scheduling) else []
    remarks += _tokens_only(status.links)
    remarks += [_move(move) for move in status.moves[:MOST_MOVES]]
    remarks += [Text(f"and {more} more moves", "dim")] if (more := len(status.moves) - MOST_MOVES) > 0 else []
    remarks += [Text(f"! {warning}", "yellow") for warning in status.warnings]
    return [Text(), *remarks] if remarks else []


def _why(worker: WorkerStatus) -> str:
    why = f"{worker.why} for {duration_text(worker.loan.age_s)}" if worker.loan is not None else worker.why
    return f"class {worker.size_class}, {why}" if worker.size_class else why


def _tokens_only(links: Sequence[LinkStatus]) -> list[Text]:
    """Return one line per reason why KV is not copied, with the links it applies to."""
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


def _request_table(requests: tuple[RequestStatus, ...], capacities: dict[str, int | None]) -> Table:
    table = plain_table(gap=2)
    # The one column that shrinks on a narrow terminal: the beginning of an id tells it from others.
    table.add_column("Request", overflow="ellipsis", min_width=12)
    moved = any(request.moves for request in requests)
    suspended = any(request.suspensions for request in requests)
    tiered = any(request.tier is not Tier.DEFAULT for request in requests)
    for title in ("Worker", "Class", "Phase", *(("Tier",) if tiered else ())):
        table.add_column(title, no_wrap=True)
    counts = *(("Moves",) if moved else ()), *(("Suspended",) if suspended else ())
    for title in ("Prompt", "Output", "KV", "Age", *counts):
        table.add_column(title, justify="right", no_wrap=True)
    for request in requests:
        phase = "queued" if request.worker is None else request.phase.value
        where = f"{request.worker}>{request.moving_to}" if request.moving_to else request.worker or UNKNOWN
        where += " pinned" if request.pinned else ""
        letter = class_letter(request.kv_bytes, capacities.get(request.worker or "", 0))
        size_class = Text(letter or UNKNOWN, STYLES.get(letter, "dim"))
        cells: list[Text | str] = [request.request, where, size_class, Text(phase, PHASE_STYLES[phase])]
        cells += (Text(request.tier.value, TIER_STYLES[request.tier]),) if tiered else ()
        cells += [f"{request.prompt_tokens:,}", f"{request.output_tokens:,}", size_text(request.kv_bytes)]
        cells += [duration_text(request.age_s), *((str(request.moves),) if moved else ())]
        cells += [str(request.suspensions)] if suspended else []
        table.add_row(*cells)
    return table


# -- devices that several models share ------------------------------------------------------------------------------


def device_table(status: DaemonStatus, *, ascii_only: bool) -> Table:
    """Return each model's share of each device, and the free part, with bars."""
    marks = ASCII if ascii_only else UNICODE
    table = plain_table(gap=2)
    for title in ("Device", "Model", "State", ""):
        table.add_column(title, no_wrap=True)
    for title in ("Weights", "KV lent", "In use"):
        table.add_column(title, justify="right", no_wrap=True)
    for device in status.devices:
        for one in device.models:
            weights, lent = bar_cells((one.resident_bytes, one.granted_bytes), device.memory_bytes, DEVICE_BAR_CELLS)
            bar = Text(marks.held * weights, "cyan").append(marks.other * lent, "green")
            sizes = [size_text(size) for size in (one.resident_bytes, one.granted_bytes, one.used_bytes)]
            table.add_row(device.device, one.model, one.state, bar, *(sizes if one.resident_bytes else ()))
        (free,) = bar_cells((device.free_bytes,), device.memory_bytes, DEVICE_BAR_CELLS)
        rest = Text(marks.free * free, "dim")
        table.add_row(
            device.device, "free", f"of {size_text(device.memory_bytes)}", rest, "", size_text(device.free_bytes)
        )
    return table


# -- models ----------------------------------------------------------------------------------------------------------


def model_table(status: DaemonStatus) -> Table:
    """Return the served models, one a row."""
    table = plain_table(gap=2)
    for title in ("Model", "State", "Workers", "Requests", "Capabilities", "Also called"):
        table.add_column(title, no_wrap=title not in ("Capabilities", "Also called"))
    for model in status.served:
        workers = ", ".join(one.worker for one in status.workers if one.model == model.model and one.pid is not None)
        requests = sum(one.model == model.model for one in status.requests)
        said = "; ".join(filter(None, (", ".join(model.names[1:]), model.reason)))
        can = ", ".join(model.capabilities) or UNKNOWN
        table.add_row(model.model, model.state.value, workers or UNKNOWN, str(requests), can, said)
    return table
