"""The paper's Update, corrected: reactions to growth.  MELL, section VI, Fig. 10 (c).

Owns the rules for class changes and overloads.

A request that has changed class stays while it fits; a property that this breaks is settled like any other hole.  An
overloaded bin sheds the smallest item that cures it, never its L.  As printed, T and S that became S or M would be
allocated again, and an L that overloads its bin would send all others away.
"""

from melld.scheduler.policies.mell.allocate import allocate, least_sufficient
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import SizeClass
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
    plan.note_hole(bin_, was)
