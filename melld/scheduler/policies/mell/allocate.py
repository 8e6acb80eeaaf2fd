"""Where an item goes: the paper's Allocate, for arrivals and for items that must leave their bin.

Owns the choice among bins and the evictions that it takes.  MELL, section VI, Fig. 10 (a).

    T    a bin that holds L, M or S for the most part and has room, else the latest T-bin, else a new one
    S M  beside the single L with room and the highest priority (T in the way leave), else the latest bin of the
         class, else a new one
    L    a new one; then an S or M that fits is brought to it

Where the text as printed is wanted (`MellSettings.literal`), T looks at L-bins only.  With a bounded number of
workers, any bin with room is the last resort.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import L, M, S, SizeClass, T
from melld.scheduler.policies.mell.plan import Plan
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request

CANDIDATES = 8  # of how many that fit, the roomiest first, the one with the highest priority is taken
SLOTS_AT_MOST = 256  # a worker without a slot limit is reckoned as vLLM's default


def arrive(plan: Plan, request: Request, reason: Reason) -> bool:
    """Place a waiting request; False if no bin has room."""
    item = plan.book.new_item(request)
    if item.grouped and (group := _open_group(plan, item)) is not None and _still_open(plan, group, item):
        plan.join(request, group, reason)
        return True
    if allocate(plan, item, reason):
        return True
    del plan.book.item_of[request]
    return False


def allocate(plan: Plan, item: Item, reason: Reason, avoid: Bin | None = None) -> bool:
    """Place the item, or move it, to where its class belongs; False (and nothing changed for it) if nothing fits."""
    klass = item.klass
    bin_ = _choose(plan, item, reason, avoid)
    if bin_ is not None and not plan.ready(bin_, item):
        bin_ = _choose(plan, item, reason, avoid)  # no move is held back any more
    if bin_ is None or not plan.ready(bin_, item):
        return False
    source = item.bin
    plan.place(item, bin_, reason)
    if source is not None:
        plan.note_hole(source, klass)
    if klass is L or (klass is not T and not plan.settings.literal):
        plan.note_hole(bin_, klass)  # it may want a partner, or T now that it is complete
    return True


def evict_for(plan: Plan, bin_: Bin, item: Item) -> bool:
    """Move T out of the bin until the item fits; only as many as stand in the way.

    While a move takes time its bytes are not free yet: then nothing is evicted.
    """
    while not plan.takes(bin_, item):
        lacking_bytes = item.reckoned_bytes - plan.book.free_bytes(bin_)
        tees = [other for other in bin_.items if other.klass is T and not other.is_fixed]
        if not (plan.instant and plan.may_evict) or not 0 < lacking_bytes <= sum(tee.reckoned_bytes for tee in tees):
            return False
        if not allocate(plan, least_sufficient(tees, lacking_bytes), Reason.EVICT, avoid=bin_):
            return False
    return True


def best(plan: Plan, bins: Iterable[Bin], near: Bin | None) -> Bin | None:
    """The bin with the highest priority as seen from `near` (None: from nowhere); the first among equals."""
    chosen, highest = None, float("-inf")
    for bin_ in bins:
        priority = _priority(plan, bin_, near)
        if priority > highest:
            chosen, highest = bin_, priority
    return chosen


def _priority(plan: Plan, bin_: Bin, near: Bin | None) -> float:
    worker = bin_.worker
    idle_share = plan.book.free_bytes(bin_) / max(worker.capacity_bytes, 1)
    taken_share = (worker.count + bin_.planned_count) / max(min(worker.slots, SLOTS_AT_MOST), 1)
    is_near = near is not None and near.worker.machine == worker.machine
    return plan.settings.workload_weight * (idle_share - taken_share) + plan.settings.distance_weight * is_near


def least_sufficient(items: list[Item], lacking_bytes: int) -> Item:
    """The smallest item that frees enough, else the largest."""
    enough = [item for item in items if item.reckoned_bytes >= lacking_bytes]
    if enough:
        return min(enough, key=lambda item: (item.reckoned_bytes, item.order))
    return max(items, key=lambda item: (item.reckoned_bytes, -item.order))


def _open_group(plan: Plan, item: Item) -> Item | None:
    """The fullest open group whose bin has room."""
    for group in islice(plan.book.open_groups.downwards(), CANDIDATES):
        bin_ = group.bin
        if bin_ is not None and plan.takes(bin_, item):
            return group
    return None


def _still_open(plan: Plan, group: Item, item: Item) -> bool:
    """Making room for a member may have rearranged the group itself."""
    bin_ = group.bin
    return bin_ is not None and plan.ready(bin_, item) and group in plan.book.open_groups


def _choose(plan: Plan, item: Item, reason: Reason, avoid: Bin | None) -> Bin | None:
    plan.book.settle_orders()
    klass = item.klass
    if klass is T:
        found = _choose_for_t(plan, item, avoid)
    elif klass is L:
        found = None
    else:
        found = _choose_for_s_or_m(plan, item, avoid)
    return found or plan.new_bin(item, reason, avoid) or _anywhere(plan, item, avoid)


def _choose_for_t(plan: Plan, item: Item, avoid: Bin | None) -> Bin | None:
    classes = (L,) if plan.settings.literal else (L, M, S)
    upper = chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in classes)
    if (found := best(plan, (bin_ for bin_ in upper if not bin_.is_open), item.bin)) is not None:
        return found
    if (hole := _hole(plan, item, T, avoid)) is not None:
        return hole
    latest = plan.book.latest(T, besides=avoid)
    if latest is not None and plan.takes(latest, item):
        return latest
    if plan.settings.literal:
        return None
    rest = chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in (T, S, M))
    return next(rest, None)


def _choose_for_s_or_m(plan: Plan, item: Item, avoid: Bin | None) -> Bin | None:
    room = plan.book.single.downwards(floor=item.reckoned_bytes)
    fitting = (bin_ for bin_ in islice(room, CANDIDATES) if bin_ is not avoid)
    beside = best(plan, fitting, item.bin)
    if beside is not None and evict_for(plan, beside, item):
        return beside
    if (hole := _hole(plan, item, item.klass, avoid)) is not None:
        return hole
    for bin_ in _unfinished(plan, item.klass, avoid):
        if evict_for(plan, bin_, item):
            return bin_
    return None


def _unfinished(plan: Plan, klass: SizeClass, avoid: Bin | None) -> list[Bin]:
    """Bins of the class that want one more of it: the latest, as printed; or all that the proof calls open."""
    if not plan.settings.literal:
        unfinished = (bin_ for bin_ in plan.book.open[klass] if bin_ is not avoid)
        return sorted(unfinished, key=lambda bin_: (-bin_.weight_sixths, -bin_.order))
    latest = plan.book.latest(klass, besides=avoid)
    return [latest] if latest is not None and latest.is_open else []


def _hole(plan: Plan, item: Item, klass: SizeClass, avoid: Bin | None) -> Bin | None:
    """Batching: a bin that a refill would fill with an item of this class can take the arrival instead.

    As printed the refill is then off; mended, the hole is looked at all the same: the arrival may not have filled it.
    """
    for bin_, wanted in plan.holes:
        if wanted is klass and bin_ is not avoid and bin_.items and bin_.klass is klass and plan.takes(bin_, item):
            if plan.settings.literal:
                del plan.holes[bin_, wanted]
            return bin_
    return None


def _roomiest(plan: Plan, klass: SizeClass, item: Item, avoid: Bin | None) -> Iterator[Bin]:
    roomy = plan.book.by_free[klass].downwards(floor=item.reckoned_bytes)
    return (bin_ for bin_ in islice(roomy, CANDIDATES) if bin_ is not avoid and plan.takes(bin_, item))


def _anywhere(plan: Plan, item: Item, avoid: Bin | None) -> Bin | None:
    """The last resort when no worker can be woken: the class least disturbed first."""
    plan.book.settle_orders()
    return next(chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in (T, S, M, L)), None)
