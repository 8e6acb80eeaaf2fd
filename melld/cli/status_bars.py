"""A worker as a bar of its requests, each in its size class: the picture of the page at `/`, in characters.

Owns the marks and the letters and colours of the classes.  Never lays out a table.

    S■■■■■■T■■■■T■■■»t■t▪▪□□□···     a request begins with the letter of its class; » is moving away;
                                     ▪ other blocks in use; □ reserved for requests on their way here; · free
"""

from collections.abc import Iterable
from typing import NamedTuple

from rich.text import Text

from melld.cli.render import bar_cells
from melld.control.status import RequestStatus, WorkerStatus
from melld.scheduler.policies.mell.classes import TINY, L, Limits, M, S, T

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


def class_letter(kv_bytes: int, capacity_bytes: int) -> str:
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
