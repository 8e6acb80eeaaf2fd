"""The paper's Allocate: chooses the bin of an arrival, or of an item that must leave its bin.

Owns the choice among bins and the evictions that it needs.  MELL, section VI, Fig. 10 (a).

    T    an L-, M- or S-bin with room, else the latest T-bin, else a new bin
    S M  beside the single L with room and the highest priority (evicting T if needed), else the latest bin of the
         class, else a new bin
    L    a new bin; then an S or M that fits is brought to it

The paper's text as printed has T look at L-bins only.  With a bounded number of workers, any bin with room is the last
resort.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.classes import L, M, S, SizeClass, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request

CANDIDATES = 8  # of the roomiest bins that fit; the highest priority among them wins
SLOTS_AT_MOST = 256  # vLLM's default, for a worker without a slot limit
NEARNESS = 0.1  # idle share that it is worth to stay on the request's machine


def arrive(plan: MellPlan, request: Request, reason: Reason) -> bool:
    """Place a waiting request; return False if no bin has room."""
    item = plan.book.new_item(request)
    if item.grouped and (group := _open_group(plan, item)) is not None and _still_open(plan, group, item):
        plan.join(request, group, reason)
        return True
    if allocate(plan, item, reason):
        return True
    del plan.book.item_of[request]
    return False


def allocate(plan: MellPlan, item: Item, reason: Reason, avoid: Bin | None = None) -> bool:
    """Place or move the item to where its class belongs; return False, with the item unchanged, if nothing fits."""
    klass = item.klass
    bin_ = _choose(plan, item, reason, avoid)
    if bin_ is not None and not plan.ready(bin_, item):
        bin_ = _choose(plan, item, reason, avoid)  # no move is held back now
    if bin_ is None or not plan.ready(bin_, item):
        return False
    source = item.bin
    plan.place(item, bin_, reason)
    if source is not None:
        plan.note_hole(source, klass)
    if klass is not T:
        plan.note_hole(bin_, klass)  # it may need a partner, or T now that it is complete
    return True


def evict_for(plan: MellPlan, bin_: Bin, item: Item) -> bool:
    """Evict T from the bin until the item fits, no more than necessary; return True if it fits.

    Evict nothing where moves take time, because their bytes do not become free at once.
    """
    while not plan.takes(bin_, item):
        lacking_bytes = item.projected_bytes - plan.book.free_bytes(bin_)
        tees = [other for other in bin_.items if other.klass is T and not other.is_fixed]
        if not (plan.instant and plan.may_evict) or not 0 < lacking_bytes <= sum(tee.projected_bytes for tee in tees):
            return False
        if not allocate(plan, least_sufficient(tees, lacking_bytes), Reason.EVICT, avoid=bin_):
            return False
    return True


def best(plan: MellPlan, bins: Iterable[Bin], near: Bin | None) -> Bin | None:
    """Return the bin with the highest priority seen from `near` (None: no place); the first among equals."""
    return max(bins, key=lambda bin_: _priority(plan, bin_, near), default=None)


def _priority(plan: MellPlan, bin_: Bin, near: Bin | None) -> float:
    worker = bin_.worker
    idle_share = plan.book.free_bytes(bin_) / max(worker.capacity_bytes, 1)
    taken_share = (worker.count + bin_.planned_count) / max(min(worker.slots, SLOTS_AT_MOST), 1)
    is_near = near is not None and near.worker.machine == worker.machine
    return idle_share - taken_share + NEARNESS * is_near


def least_sufficient(items: list[Item], lacking_bytes: int) -> Item:
    """Return the smallest item that frees enough, else the largest."""
    enough = [item for item in items if item.projected_bytes >= lacking_bytes]
    if enough:
        return min(enough, key=lambda item: (item.projected_bytes, item.order))
    return max(items, key=lambda item: (item.projected_bytes, -item.order))


def _open_group(plan: MellPlan, item: Item) -> Item | None:
    """Return the fullest open group whose bin has room."""
    for group in islice(plan.book.open_groups.downwards(), CANDIDATES):
        bin_ = group.bin
        if bin_ is not None and plan.takes(bin_, item):
            return group
    return None


def _still_open(plan: MellPlan, group: Item, item: Item) -> bool:
    """Make room for the item; return True if the group is still open (making room may rearrange it)."""
    bin_ = group.bin
    return bin_ is not None and plan.ready(bin_, item) and group in plan.book.open_groups


def _choose(plan: MellPlan, item: Item, reason: Reason, avoid: Bin | None) -> Bin | None:
    plan.book.settle_orders()
    klass = item.klass
    if klass is T:
        found = _choose_for_t(plan, item, avoid)
    elif klass is L:
        found = None
    else:
        found = _choose_for_s_or_m(plan, item, avoid)
    return found or plan.new_bin(item, reason, avoid) or _anywhere(plan, item, avoid)


def _choose_for_t(plan: MellPlan, item: Item, avoid: Bin | None) -> Bin | None:
    upper = chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in (L, M, S))
    if (found := best(plan, (bin_ for bin_ in upper if not bin_.is_open), item.bin)) is not None:
        return found
    if (hole := _hole(plan, item, T, avoid)) is not None:
        return hole
    latest = plan.book.latest(T, besides=avoid)
    if latest is not None and plan.takes(latest, item):
        return latest
    rest = chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in (T, S, M))
    return next(rest, None)


def _choose_for_s_or_m(plan: MellPlan, item: Item, avoid: Bin | None) -> Bin | None:
    room = plan.book.single.downwards(floor=item.projected_bytes)
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


def _unfinished(plan: MellPlan, klass: SizeClass, avoid: Bin | None) -> list[Bin]:
    """Return the bins that need one more of the class: all open bins of the proof."""
    unfinished = (bin_ for bin_ in plan.book.open[klass] if bin_ is not avoid)
    return sorted(unfinished, key=lambda bin_: (-bin_.weight_sixths, -bin_.order))


def _hole(plan: MellPlan, item: Item, klass: SizeClass, avoid: Bin | None) -> Bin | None:
    """Return a bin that waits for a refill of this class, so that it takes the arrival instead (batching).

    The hole is still settled later: the arrival may not fill it.
    """
    for bin_, wanted in plan.holes:
        if wanted is klass and bin_ is not avoid and bin_.items and bin_.klass is klass and plan.takes(bin_, item):
            return bin_
    return None


def _roomiest(plan: MellPlan, klass: SizeClass, item: Item, avoid: Bin | None) -> Iterator[Bin]:
    roomy = plan.book.by_free[klass].downwards(floor=item.projected_bytes)
    return (bin_ for bin_ in islice(roomy, CANDIDATES) if bin_ is not avoid and plan.takes(bin_, item))


def _anywhere(plan: MellPlan, item: Item, avoid: Bin | None) -> Bin | None:
    """Return any bin with room, if no worker can be woken: the least disturbed class first."""
    plan.book.settle_orders()
    return next(chain.from_iterable(_roomiest(plan, klass, item, avoid) for klass in (T, S, M, L)), None)
