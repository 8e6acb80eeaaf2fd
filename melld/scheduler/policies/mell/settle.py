"""The corrected rules: the properties of a bin after every operation, and the moves that restore them.

Allocate, depart and update note bins that may break a property in `MellPlan.holes`; this module settles them one by
one.

The corrected Theorem 1.  Weights are those of the proof (L 1, M 1/2, S 1/3, T 0); a bin is *filled* when it is more
than 75 % full.  After every operation, with instant moves, enough workers and no operation held back:

    (1) every M-bin weighs at least 1 (two M, or M with two S that have grown in place), except one
    (2) every S-bin holds three S, except one
    (3) every T-bin is filled, except one
    (4) an L-bin has no S or M beside its L only if none in the S- and M-bins fits there; no exception
    (5) a T-bin exists only if every L-, M- and S-bin is filled, except those of (1) and (2)

Hence at most three exceptions in all, and the ratio 4/3 against repacking: if a T-bin exists, all bins but three are
more than 3/4 full; if none does, all but two weigh at least 1, no bin of the optimum weighs more than 4/3 but those
with an L and an M (3/2), and by (4) a single L of ours meets there only partners that ours has beside other L.
"""

from melld.scheduler.policies.mell.allocate import allocate, evict_for
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import TINY, L, M, S, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.policies.mell.pull import bring_partner, pull, stranded, t_source
from melld.scheduler.reasons import Reason


def settle(plan: MellPlan, bin_: Bin) -> None:
    """Restore the properties of the bin; note the bins that this disturbs in `plan.holes`."""
    book = plan.book
    book.settle_orders()
    if bin_.klass is TINY:
        return
    if bin_.klass is L:
        if not bin_.has_partner:
            bring_partner(plan, bin_)
    elif bin_.klass is not T:
        _mate(plan)
        _complete(plan, bin_)
    if bin_.klass is T:
        _settle_t(plan)
    elif bin_.klass is not TINY and not bin_.is_open:
        fill(plan, bin_)


def fill(plan: MellPlan, bin_: Bin) -> None:
    """Restore (5): bring T from T-bins until the bin is filled."""
    book = plan.book
    while not book.limits.is_filled(book.free_bytes(bin_)):
        source = t_source(plan, bin_)
        if source is None or not pull(plan, bin_, source, (T,), book.free_bytes(bin_)):
            return
        plan.note_hole(source, T)


def _settle_t(plan: MellPlan) -> None:
    """Restore (3) and (5): fill other bins first, then merge T-bins that are not filled."""
    book = plan.book
    for klass in (L, M, S):
        roomiest = next((b for b in book.by_free[klass].downwards() if not b.is_open), None)
        if roomiest is not None and not book.limits.is_filled(book.free_bytes(roomiest)):
            fill(plan, roomiest)
    while len(book.open[T]) > 1:
        giver, *_, taker = sorted(book.open[T], key=lambda b: (-book.free_bytes(b), -b.order))
        if not pull(plan, taker, giver, (T,), book.free_bytes(taker)):
            return
        plan.note_hole(giver, T)


def _mate(plan: MellPlan) -> None:
    """Restore (4): bring the roomiest single L a partner while one fits."""
    book = plan.book
    while (single := next(book.single.downwards(), None)) is not None:
        smallest = next(book.by_smallest.upwards(), None)
        if smallest is None or smallest.smallest_bytes is None:
            return
        if smallest.smallest_bytes > book.room_beside_bytes(single) or not bring_partner(plan, single):
            return
        plan.note_hole(single, S)
        book.settle_orders()


def _complete(plan: MellPlan, bin_: Bin) -> None:
    """Restore (1) and (2): of two open bins of a class, one gives to the other; an S that keeps two M apart leaves.

    An item is given only once: while moves are in flight both sides count it, so giving may not change which is open.
    """
    book = plan.book
    given: set[Item] = set()
    while bin_.is_open and len(book.open[bin_.klass]) > 1:
        klass = bin_.klass
        other = next(b for b in book.open[klass] if b is not bin_)
        taker, giver = sorted((bin_, other), key=lambda b: (-b.weight_sixths, b.order))
        if not (
            _give(plan, giver, taker, given)
            or _give(plan, taker, giver, given)
            or _dismiss_s(plan, giver, taker, given)
        ):
            return
        plan.note_hole(giver, klass)
        plan.note_hole(taker, klass)
        book.settle_orders()


def _give(plan: MellPlan, giver: Bin, taker: Bin, given: set[Item]) -> bool:
    """Move the largest S or M that fits from the giver to the taker."""
    for item in stranded(giver):
        if item.klass is not T and item not in given and evict_for(plan, taker, item):
            given.add(item)
            plan.place(item, taker, Reason.COMPLETE)
            return True
    return False


def _dismiss_s(plan: MellPlan, giver: Bin, taker: Bin, given: set[Item]) -> bool:
    """Move the S of one of two bins with an M and an S to the S-bins, so that the two M can join."""
    for bin_ in (taker, giver):
        for item in stranded(bin_):
            is_s_beside_m = bin_.klass is M and item.klass is S and item not in given
            if is_s_beside_m and allocate(plan, item, Reason.COMPLETE, avoid=bin_):
                given.add(item)
                return True
    return False
