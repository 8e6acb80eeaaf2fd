"""MELL's items and bins.

An item is a request of at least class T, or a group of tiny requests that moves as one T (a multi-item).  A bin is a
worker as MELL sees it: its items, and what follows from them.  Owns an item's requests and size; knows no rule and
nothing of where items go: `book.BinBook` fills the bins.

A group of at most C/8 is open: tiny arrivals join it.  A group above C/4 is split in its bin, and a member that
outgrows C/8 becomes a separate item there, so a group is always worth one T.
"""

import msgspec

from melld.scheduler.policies.mell.classes import FULL_SIXTHS, TINY, Limits, M, S, SizeClass, T
from melld.scheduler.state import Request, Worker


class Item(msgspec.Struct, eq=False):
    """Requests that are packed and moved together, all planned for `bin`.

    `projected_bytes`: their size one horizon ahead; `sizes`: the share of each.  `moving` counts requests whose move is
    in flight.  A pinned request is a separate item.
    """

    order: int
    grouped: bool
    klass: SizeClass = T
    sizes: dict[Request, int] = {}
    projected_bytes: int = 0
    moving: int = 0
    bin: "Bin | None" = None

    @property
    def is_fixed(self) -> bool:
        """Return True if the item may not be moved: part of it is moving, or an operator has pinned its request."""
        return self.moving > 0 or (not self.grouped and any(request.pinned for request in self.sizes))

    def add(self, request: Request, projected_bytes: int, limits: Limits) -> None:
        """Add the request to this item."""
        self.sizes[request] = projected_bytes
        self.projected_bytes += projected_bytes
        self.moving += request.destination is not None
        if not self.grouped:
            self.klass = class_of_single(projected_bytes, limits)

    def remove(self, request: Request) -> int:
        """Remove the request from this item; return its projected size."""
        projected_bytes = self.sizes.pop(request)
        self.projected_bytes -= projected_bytes
        return projected_bytes

    def resize(self, request: Request, projected_bytes: int) -> None:
        """Change the request's size; the caller updates the class."""
        self.projected_bytes += projected_bytes - self.sizes[request]
        self.sizes[request] = projected_bytes


class Bin(msgspec.Struct, eq=False):
    """A worker and the items planned for it.

    `planned_bytes` and `planned_count`: what the plan adds to the worker's sums (negative: removes).  `order`: unique,
    and renewed when the bin enters a class; the greatest is the latest.  `BinBook.derive` derives the rest from the
    items.
    """

    worker: Worker
    items: dict[Item, None] = {}
    planned_bytes: int = 0
    planned_count: int = 0
    order: int = 0
    klass: SizeClass = TINY  # the class of an empty bin
    large: Item | None = None
    has_partner: bool = False  # an S or M beside the L
    weight_sixths: int = 0
    t_bytes: int = 0  # of T items that may be moved
    smallest_bytes: int | None = None  # of S and M items that may be moved
    open_group: Item | None = None

    @property
    def is_open(self) -> bool:
        """Return True if the proof demands one more S or M here."""
        return S <= self.klass <= M and self.weight_sixths < FULL_SIXTHS


def class_of_single(projected_bytes: int, limits: Limits) -> SizeClass:
    """Return the class of a request that is a separate item: a tiny one counts as T, like a group."""
    klass = limits.class_of(projected_bytes)
    return T if klass is TINY else klass


def halves(item: Item) -> list[Request]:
    """Return the members to split off a group so that both parts are as close to half as possible."""
    kept_bytes = leaving_bytes = 0
    leaving = []
    for request, size in sorted(item.sizes.items(), key=lambda pair: (-pair[1], pair[0].sequence)):
        if leaving_bytes < kept_bytes:
            leaving_bytes += size
            leaving.append(request)
        else:
            kept_bytes += size
    return leaving
