"""MELL's book of plans: items in bins, and the bins of each class in order.

Owns items, bins and the orders of bins that the rules need.  The Cluster owns the bytes: a bin adds only what is
planned and not yet carried out.  Never decides, never records a command.

    Request ∈ Item ∈ Bin ─1:1─ Worker        a bin's class is that of its largest item
"""

from melld.scheduler.cluster import Cluster
from melld.scheduler.index import Ladder
from melld.scheduler.policies.mell.bins import Bin, Item, halves
from melld.scheduler.policies.mell.classes import TINY, WEIGHT_SIXTHS, L, Limits, M, S, SizeClass, T
from melld.scheduler.state import Duty, Request, Worker


class BinBook:
    """Items, bins, and the orders of bins."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.limits = Limits.of(max(cluster.roster.largest_capacity_bytes, 1))
        self.item_of: dict[Request, Item] = {}
        self.bins: dict[Worker, Bin] = {}
        self.vacant: dict[Bin, None] = {}  # awake and empty, also in the plan
        self.open: dict[SizeClass, dict[Bin, None]] = {S: {}, M: {}, T: {}}
        self.by_free: dict[SizeClass, Ladder[Bin]] = {T: Ladder(), S: Ladder(), M: Ladder(), L: Ladder()}
        self.by_order: dict[SizeClass, Ladder[Bin]] = {T: Ladder(), S: Ladder(), M: Ladder(), L: Ladder()}
        self.single: Ladder[Bin] = Ladder()  # L without a partner, by the room beside the L
        self.by_smallest: Ladder[Bin] = Ladder()  # S- and M-bins, by their smallest S or M that may be moved
        self.open_groups: Ladder[Item] = Ladder()
        self._touched: dict[Bin, None] = {}
        self._orders = 0

    # ---- asking

    def free_bytes(self, bin_: Bin) -> int:
        """Return the bytes that the plan leaves free one horizon ahead."""
        worker = bin_.worker
        count = worker.count + bin_.planned_count
        used_bytes = worker.used_bytes + bin_.planned_bytes
        return worker.capacity_bytes - used_bytes - count * self.cluster.ahead_bytes

    def room_beside_bytes(self, bin_: Bin) -> int:
        """Return the bytes free for an S or M after evicting T; where moves take time, T cannot be evicted."""
        return self.free_bytes(bin_) + (bin_.t_bytes if self.cluster.settings.instant_moves else 0)

    def free_slots(self, bin_: Bin) -> int:
        """Return the slots that the plan leaves free."""
        return bin_.worker.slots - bin_.worker.count - bin_.planned_count

    def latest(self, klass: SizeClass, besides: Bin | None = None) -> Bin | None:
        """Return the bin that entered the class last, other than `besides`."""
        self.settle_orders()
        for bin_ in self.by_order[klass].downwards():
            if bin_ is not besides:
                return bin_
        return None

    def projected(self, request: Request) -> int:
        """Return the request's size one horizon ahead, at most a worker's capacity: alone it needs no horizon."""
        kv_bytes = request.kv_bytes
        return max(kv_bytes, min(kv_bytes + self.cluster.ahead_bytes, self.limits.capacity_bytes))

    # ---- items

    def new_item(self, request: Request) -> Item:
        """Return a new item of the request, in no bin yet: a group of one if the request is tiny and may be moved."""
        projected_bytes = self.projected(request)
        item = Item(self._next_order(), grouped=projected_bytes <= self.limits.tiny_bytes and not request.pinned)
        item.add(request, projected_bytes, self.limits)
        self.item_of[request] = item
        return item

    def join(self, request: Request, group: Item) -> None:
        """Add the tiny request to the group."""
        group.add(request, self.projected(request), self.limits)
        self.item_of[request] = group
        self.regroup(group)

    def forget(self, request: Request, was_moving: bool = False) -> tuple[Item, Bin]:
        """Drop a request that has ended or will be planned again; return its former item and bin."""
        item = self.item_of.pop(request)
        bin_ = item.bin
        assert bin_ is not None, request.id
        item.remove(request)
        item.moving -= was_moving
        if item.sizes:
            self.regroup(item)
        else:
            self.take_out(item)
        self.touch(bin_)
        return item, bin_

    def put_in(self, item: Item, bin_: Bin) -> None:
        """Plan the item for the bin."""
        assert item.bin is None
        item.bin = bin_
        bin_.items[item] = None
        self.regroup(item)
        self.touch(bin_)

    def take_out(self, item: Item) -> None:
        """Remove the item from its bin's plan."""
        bin_ = item.bin
        assert bin_ is not None
        del bin_.items[item]
        item.bin = None
        self._close(item, bin_)
        self.touch(bin_)

    def split_off(self, item: Item, requests: list[Request]) -> Item:
        """Split these members off into a new item in the same bin, not grouped if the member has outgrown C/8."""
        bin_ = item.bin
        assert bin_ is not None
        grouped = item.grouped and item.sizes[requests[0]] <= self.limits.tiny_bytes
        part = Item(self._next_order(), grouped)
        for request in requests:
            part.add(request, item.remove(request), self.limits)
            self.item_of[request] = part
        item.moving -= part.moving
        self.put_in(part, bin_)
        if item.sizes:
            self.regroup(item)
        else:
            self.take_out(item)
        return part

    def regroup(self, item: Item) -> None:
        """Restore the rule for a bin's groups: none above C/4, at most one open."""
        bin_ = item.bin
        if bin_ is None or not item.grouped:
            return
        if item.projected_bytes > self.limits.tiny_bytes:
            self._close(item, bin_)
            if item.projected_bytes > self.limits.t_bytes:
                self.split_off(item, halves(item))
            return
        other = bin_.open_group
        if other is not None and other is not item:
            self._merge(item, other)
            return
        bin_.open_group = item
        self.open_groups.put(item, item.projected_bytes)

    def _close(self, item: Item, bin_: Bin) -> None:
        self.open_groups.discard(item)
        if bin_.open_group is item:
            bin_.open_group = None

    def _merge(self, item: Item, other: Item) -> None:
        """Merge two open groups of one bin."""
        for request, size in item.sizes.items():
            other.add(request, size, self.limits)
            self.item_of[request] = other
        item.sizes.clear()
        self.take_out(item)
        self.regroup(other)

    # ---- bins

    def bin_of(self, worker: Worker) -> Bin:
        """Return the worker's bin."""
        bin_ = self.bins.get(worker)
        if bin_ is None:
            bin_ = self.bins[worker] = Bin(worker)
        return bin_

    def touch(self, bin_: Bin) -> None:
        """Mark the bin: its items or sums may have changed."""
        self._touched[bin_] = None

    def settle_orders(self) -> None:
        """Bring the orders up to date; changes are collected until they are needed."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for bin_ in touched:
            self.derive(bin_)

    def derive(self, bin_: Bin) -> None:
        """Derive the bin's fields from its items, and its place in every order."""
        large = None
        partner = False
        weight = t_bytes = 0
        smallest = None
        klass = TINY
        for item in bin_.items:
            kind = item.klass
            klass = max(klass, kind)
            if kind is T:
                if not item.is_fixed:
                    t_bytes += item.projected_bytes
                continue
            weight += WEIGHT_SIXTHS[kind]
            if kind is L:
                large = item
            else:
                partner = True
                if not item.is_fixed and (smallest is None or item.projected_bytes < smallest):
                    smallest = item.projected_bytes
        bin_.large = large
        bin_.has_partner = partner
        bin_.weight_sixths = weight
        bin_.t_bytes = t_bytes
        bin_.smallest_bytes = smallest
        self._file(bin_, klass if bin_.worker.state is Duty.ACTIVE else TINY)

    def _file(self, bin_: Bin, klass: SizeClass) -> None:
        """Put the bin where one of its class belongs, and take it out of everything else."""
        if klass is not bin_.klass:
            if bin_.klass is not TINY:
                self.by_order[bin_.klass].discard(bin_)
                self.by_free[bin_.klass].discard(bin_)
            bin_.klass = klass
            if klass is not TINY:
                bin_.order = self._next_order()
                self.by_order[klass].put(bin_, bin_.order)
        free_bytes = self.free_bytes(bin_)
        if klass is not TINY:
            self.by_free[klass].put(bin_, free_bytes)
        _mark(self.vacant, bin_, klass is TINY and bin_.worker.state is Duty.ACTIVE and not bin_.items)
        _mark(self.open[T], bin_, klass is T and not self.limits.is_filled(free_bytes))
        for one in (S, M):
            _mark(self.open[one], bin_, klass is one and bin_.is_open)
        self.single.put(bin_, self.room_beside_bytes(bin_) if klass is L and not bin_.has_partner else None)
        self.by_smallest.put(bin_, bin_.smallest_bytes if S <= klass <= M else None)

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders


def _mark(bins: dict[Bin, None], bin_: Bin, is_among: bool) -> None:
    if is_among:
        bins[bin_] = None
    else:
        bins.pop(bin_, None)
