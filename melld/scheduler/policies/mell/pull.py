"""Moves that bring an item from another bin to refill what a departure has emptied.

Owns the choice of the source and of the item; `settle` has the rules.  MELL, section VI, Fig. 10 (b).
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from melld.scheduler.policies.mell.allocate import CANDIDATES, best, evict_for
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import M, S, SizeClass, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.reasons import Reason


def pull(plan: MellPlan, bin_: Bin, source: Bin, classes: Iterable[SizeClass], room_bytes: int) -> bool:
    """Move the largest item of these classes that fits in `room_bytes` from the source, evicting T if needed."""
    wanted = tuple(classes)
    fitting = [i for i in source.items if i.klass in wanted and not i.is_fixed and i.projected_bytes <= room_bytes]
    for item in sorted(fitting, key=lambda item: (-item.projected_bytes, item.order)):
        if evict_for(plan, bin_, item):
            plan.place(item, bin_, Reason.REFILL)
            plan.book.settle_orders()
            return True
    return False


def bring_partner(plan: MellPlan, bin_: Bin) -> bool:
    """Bring an S or M that fits beside the L of `bin_`, and note the hole that it leaves."""
    book = plan.book
    book.settle_orders()
    room_bytes = book.room_beside_bytes(bin_)
    source = best(plan, chain.from_iterable(_partners(plan, room_bytes)), bin_)
    if source is None:
        return False
    classes = {item: item.klass for item in source.items}
    if not pull(plan, bin_, source, (S, M), room_bytes):
        return False
    gone = next((klass for item, klass in classes.items() if item.bin is bin_), S)
    plan.note_hole(source, gone)
    return True


def _partners(plan: MellPlan, room_bytes: int) -> Iterator[list[Bin]]:
    """Yield S- and M-bins with an S or M of at most `room_bytes`; only the unfinished ones if there are any."""
    book = plan.book
    unfinished = [b for klass in (S, M) for b in book.open[klass] if _has_within(b, room_bytes)]
    if unfinished:
        yield unfinished
        return
    latest = [next(book.by_order[klass].downwards(), None) for klass in (S, M)]
    yield [bin_ for bin_ in latest if bin_ is not None and _has_within(bin_, room_bytes)]
    yield list(islice(book.by_smallest.downwards(room_bytes), CANDIDATES))


def _has_within(bin_: Bin, room_bytes: int) -> bool:
    return bin_.smallest_bytes is not None and bin_.smallest_bytes <= room_bytes


def stranded(bin_: Bin) -> list[Item]:
    """Return the items that may be moved, the largest first."""
    return sorted((i for i in bin_.items if not i.is_fixed), key=lambda item: (-item.projected_bytes, item.order))


def t_source(plan: MellPlan, bin_: Bin) -> Bin | None:
    """Return the T-bin that gives T to others: the one that is not filled, else the latest; never `bin_` itself."""
    book = plan.book
    book.settle_orders()
    for source in book.open[T]:
        if source is not bin_:
            return source
    return book.latest(T, besides=bin_)
