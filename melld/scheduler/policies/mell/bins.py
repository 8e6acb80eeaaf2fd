"""What MELL packs, and into what: items in bins.

An item is a request of at least class T, or a group of tiny requests that travels as one T (a multi-item).  A bin is a
worker as MELL sees it: its items, and what follows from them.  Owns which requests are in which item and the item's
size; knows no rule and nothing of where items go: `book.Book` fills the bins.

A group of at most C/8 is open: tiny arrivals join it.  A group above C/4 is split where it is, and a member that
outgrows C/8 becomes an item of its own where it is, so a group is always worth one T.
"""

from melld.scheduler.policies.mell.classes import FULL_SIXTHS, TINY, Limits, M, S, SizeClass, T
from melld.scheduler.state import Request, Worker


class Item:
    """Requests that are packed and moved together, all planned for `bin`.

    `reckoned_bytes` is what they need one horizon ahead; `sizes` has the part of each.  `moving` counts those whose
    move is in flight.  A request that is pinned is an item of its own.
    """

    __slots__ = ("bin", "grouped", "klass", "moving", "order", "reckoned_bytes", "sizes")

    def __init__(self, order: int, grouped: bool) -> None:
        self.order = order
        self.grouped = grouped
        self.klass = T
        self.sizes: dict[Request, int] = {}
        self.reckoned_bytes = 0
        self.moving = 0
        self.bin: Bin | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether it stays where it is: part of it is on a move, or it is a request that an operator has pinned."""
        return self.moving > 0 or (not self.grouped and any(request.pinned for request in self.sizes))

    def add(self, request: Request, reckoned_bytes: int, limits: Limits) -> None:
        """The request is of this item from now on."""
        self.sizes[request] = reckoned_bytes
        self.reckoned_bytes += reckoned_bytes
        self.moving += request.destination is not None
        if not self.grouped:
            self.klass = class_of_single(reckoned_bytes, limits)

    def remove(self, request: Request) -> int:
        """The request is of this item no more.  Returns its size as it was reckoned."""
        reckoned_bytes = self.sizes.pop(request)
        self.reckoned_bytes -= reckoned_bytes
        return reckoned_bytes

    def resize(self, request: Request, reckoned_bytes: int) -> None:
        """The request has another size; the class is the caller's to judge."""
        self.reckoned_bytes += reckoned_bytes - self.sizes[request]
        self.sizes[request] = reckoned_bytes


class Bin:
    """A worker and the items planned for it.

    `planned_bytes` and `planned_count`: what the plan adds to the worker's own sums (negative: takes away).
    `order`: unique, grows with each time that a bin enters a class; the greatest is the latest.
    The rest is derived from the items by `Book.derive`.
    """

    __slots__ = (
        "has_partner",
        "items",
        "klass",
        "large",
        "lives",
        "open_group",
        "order",
        "planned_bytes",
        "planned_count",
        "smallest_bytes",
        "t_bytes",
        "weight_sixths",
        "worker",
    )

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.items: dict[Item, None] = {}
        self.planned_bytes = 0
        self.planned_count = 0
        self.order = 0
        self.lives = 0  # how often it has been emptied: what was said of it before no longer counts
        self.klass: SizeClass = TINY  # the class of an empty bin
        self.large: Item | None = None
        self.has_partner = False  # an S or M beside the L
        self.weight_sixths = 0
        self.t_bytes = 0  # of T items that may be moved
        self.smallest_bytes: int | None = None  # of S and M items that may be moved
        self.open_group: Item | None = None

    @property
    def is_open(self) -> bool:
        """Whether the proof would have one more S or M here."""
        return S <= self.klass <= M and self.weight_sixths < FULL_SIXTHS


def class_of_single(reckoned_bytes: int, limits: Limits) -> SizeClass:
    """The class of a request that is an item of its own: a tiny one counts as T, as a group would."""
    klass = limits.class_of(reckoned_bytes)
    return T if klass is TINY else klass


def halves(item: Item) -> list[Request]:
    """The members to split off a group so that both parts come as close to half as tiny members allow."""
    kept_bytes = leaving_bytes = 0
    leaving = []
    for request, size in sorted(item.sizes.items(), key=lambda pair: (-pair[1], pair[0].sequence)):
        if leaving_bytes < kept_bytes:
            leaving_bytes += size
            leaving.append(request)
        else:
            kept_bytes += size
    return leaving
