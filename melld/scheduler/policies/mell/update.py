"""The paper's Update, as printed and as corrected: reactions to growth.  MELL, section VI, Fig. 10 (c).

Owns the rules for class changes and overloads.

Corrected: a request that has changed class stays while it fits; a property that this breaks is settled like any other
hole.  An overloaded bin sheds the smallest item that cures it, never its L.  As printed: T and S that became S or M are
allocated again, and an L that overloads its bin sends all others away.
"""

from itertools import islice

from melld.scheduler.policies.mell.allocate import CANDIDATES, allocate, best, least_sufficient
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import L, SizeClass, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.policies.mell.pull import stranded
from melld.scheduler.reasons import Reason


def overload_bytes(plan: MellPlan, bin_: Bin) -> int:
    """Return the bytes that the bin lacks once the moves away from it are done; zero or less: none."""
    worker = bin_.worker
    leaving_bytes = worker.leaving_bytes + worker.leaving * plan.cluster.ahead_bytes
    return -(plan.book.free_bytes(bin_) + leaving_bytes)


def shed(plan: MellPlan, bin_: Bin) -> None:
    """Move items out of the bin, the smallest sufficient first, until it is no longer overloaded."""
    failed: set[Item] = set()
    while (lacking_bytes := overload_bytes(plan, bin_)) > 0:
        plan.book.settle_orders()
        movable = [item for item in stranded(bin_) if item not in failed and item is not bin_.large]
        if not movable:
            return
        item = least_sufficient(movable, lacking_bytes)
        if not allocate(plan, item, Reason.OVERLOAD, avoid=bin_):
            failed.add(item)


def change_class(plan: MellPlan, item: Item, klass: SizeClass) -> None:
    """Change the class of a single request's item that has grown into `klass`."""
    bin_ = item.bin
    assert bin_ is not None
    was, item.klass = item.klass, klass
    plan.book.touch(bin_)
    if not plan.settings.literal:
        plan.note_hole(bin_, was)
    elif not item.is_fixed:
        _change_as_printed(plan, item, bin_, was)


def _change_as_printed(plan: MellPlan, item: Item, bin_: Bin, was: SizeClass) -> None:
    others = [other for other in bin_.items if other is not item]
    if item.klass is L and not any(other.klass is L for other in others):
        if overload_bytes(plan, bin_) > 0:
            send_others_away(plan, bin_, item)
        return
    if _may_stay(plan, item, bin_, others):
        return
    plan.book.take_out(item)
    if allocate(plan, item, Reason.CLASS, avoid=bin_):
        plan.note_hole(bin_, was)
    else:
        plan.book.put_in(item, bin_)


def overloaded(plan: MellPlan, bin_: Bin) -> None:
    """Shed from the bin if it is overloaded without a change of class."""
    if overload_bytes(plan, bin_) <= 0:
        return
    plan.book.settle_orders()
    if plan.settings.literal and bin_.large is not None:
        send_others_away(plan, bin_, bin_.large)
    else:
        shed(plan, bin_)


def send_others_away(plan: MellPlan, bin_: Bin, large: Item) -> None:
    """Allocate all items but the L again, as printed."""
    for item in stranded(bin_):
        if item is not large:
            allocate(plan, item, Reason.OVERLOAD, avoid=bin_)
            plan.holes.pop((bin_, item.klass), None)


def _may_stay(plan: MellPlan, item: Item, bin_: Bin, others: list[Item]) -> bool:
    """Return True if allocating again would lead back: beside the L with the highest priority (as printed)."""
    if bin_.large is None or item.klass is L or overload_bytes(plan, bin_) > 0:
        return False
    if any(other.klass is not T for other in others if other is not bin_.large):
        return False
    rivals = islice(plan.book.single.downwards(floor=item.projected_bytes), CANDIDATES)
    return best(plan, [bin_, *rivals], bin_) is bin_
