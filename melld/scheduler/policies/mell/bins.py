"""One worker as MELL sees it: a bin, its items, and what follows from them.

Owns no rule and changes nothing itself: `book.Book` fills it in.
"""

from melld.scheduler.policies.mell.classes import FULL_SIXTHS, TINY, M, S, SizeClass
from melld.scheduler.policies.mell.items import Item
from melld.scheduler.state import Worker


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
