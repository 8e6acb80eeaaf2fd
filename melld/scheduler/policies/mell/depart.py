"""The paper's Depart (Fig. 10 (b)) as printed: refills after a departure in the literal mode.

Owns the rule for each hole.  `settle` has the corrected rules.
"""

from melld.scheduler.policies.mell.allocate import allocate
from melld.scheduler.policies.mell.bins import Bin
from melld.scheduler.policies.mell.classes import L, SizeClass, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.policies.mell.pull import bring_partner, pull, stranded
from melld.scheduler.reasons import Reason


def refill(plan: MellPlan, bin_: Bin, klass: SizeClass) -> None:
    """Refill the bin after an item of the class has left (or L has arrived), as the text says."""
    book = plan.book
    book.settle_orders()
    if not bin_.items or bin_.klass == 0:
        return
    if bin_.large is not None:
        _refill_beside_large(plan, bin_, klass)
    elif klass is L:
        for item in stranded(bin_):
            allocate(plan, item, Reason.LARGE_LEFT, avoid=bin_)
    else:
        latest = book.latest(klass)
        if latest is not None and latest is not bin_:
            pull(plan, bin_, latest, (klass,), book.free_bytes(bin_) + bin_.t_bytes * (klass is not T))
        if klass is not T and bin_.klass is T:
            for item in stranded(bin_):
                allocate(plan, item, Reason.STRANDED, avoid=bin_)


def _refill_beside_large(plan: MellPlan, bin_: Bin, klass: SizeClass) -> None:
    if klass is not T:
        if not bin_.has_partner:
            bring_partner(plan, bin_)
        return
    latest = plan.book.latest(T)
    if latest is not None:
        pull(plan, bin_, latest, (T,), plan.book.free_bytes(bin_))
