"""The policy MELL: Algorithm 1 of the paper, on the scheduler's events.

Owns which rule runs at which event, and when held-back moves are carried out.

Batching on: departures leave holes, growth is handled when it is reported, arrivals fill holes or go where the rules
say; the epoch fills the remaining holes and carries out the moves.  Batching off: each event does all of it at once.
"""

from typing import ClassVar

from melld.ids import RequestId
from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.mell import allocate, settle, update
from melld.scheduler.policies.mell.bins import Bin, Item, class_of_single
from melld.scheduler.policies.mell.classes import Limits, SizeClass, T
from melld.scheduler.policies.mell.plan import MellPlan
from melld.scheduler.policy import Policy
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker


class Mell(Policy):
    """Policy of size classes, with moves that keep Theorem 1 true (see `settle`)."""

    name: ClassVar[str] = "mell"

    def __init__(self, cluster: Cluster, *, batching: bool = True) -> None:
        """`batching`: moves wait for the epoch."""
        super().__init__(cluster)
        self._batching = batching
        self.plan = MellPlan(cluster, batching=batching)
        self._ahead_bytes = cluster.ahead_bytes
        self._overloaded: dict[Bin, None] = {}

    # ---- events

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        plan = self.plan
        if request.worker is not None:
            return self._leave(request, reason)
        placed = allocate.arrive(plan, request, reason)
        for plan.may_evict in (True, False):  # held-back moves and refills may make room; the last try evicts nothing
            if placed or not (plan.holes or plan.held):
                break
            self._fill_holes()
            plan.carry_out_all()
            placed = allocate.arrive(plan, request, reason)
        plan.may_evict = True
        self._end_operation()
        return placed

    def send(self, request: Request, worker: Worker, reason: Reason) -> None:
        """See `Policy.send`."""
        self.plan.send_at_once(request, self.plan.book.bin_of(worker), reason)
        self._end_operation()

    def hold(self, request: Request) -> None:
        """See `Policy.hold`."""
        self.plan.call_off(request)
        self._end_operation()

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:
        """See `Policy.departed`."""
        self.plan.drop(request)
        book = self.plan.book
        item, bin_ = book.forget(request, was_moving=destination is not None)
        book.touch(book.bin_of(worker))  # not the item's bin, if the request was on its way there
        self.plan.note_hole(bin_, item.klass)
        self._end_operation()

    def grew(self, kv_bytes: dict[RequestId, int]) -> None:
        """See `Policy.grew`."""
        plan = self.plan
        if self.cluster.ahead_bytes != self._ahead_bytes:
            self._ahead_bytes = self.cluster.ahead_bytes
            grown = list(plan.book.item_of)
        else:
            known = self.cluster.requests
            grown = [request for name in kv_bytes if (request := known.get(name)) is not None]
        bins, changed = self._resize(grown)
        for item, klass in changed:
            if item.bin is not None:
                update.change_class(plan, item, klass)
        for bin_ in bins:
            if update.overload_bytes(plan, bin_) > 0:
                self._overloaded[bin_] = None
        self._judge_overloads()
        self._end_operation()

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:
        """See `Policy.moved`."""
        plan = self.plan
        item = plan.book.item_of.get(request)
        known = self.cluster.workers
        if item is None or source.id not in known or destination.id not in known:
            return  # a worker is gone: `changed` follows and rebuilds the book
        item.moving -= 1
        for worker in (source, destination):
            plan.book.touch(plan.book.bin_of(worker))
        if request.worker is source:
            plan.call_off(request)
        plan.note_hole(plan.book.bin_of(source), T)
        self._end_operation()

    def changed(self, worker: Worker) -> None:
        """See `Policy.changed`."""
        plan = self.plan
        limits = Limits.of(max(self.cluster.roster.largest_capacity_bytes, 1))
        if limits != plan.book.limits or worker.id not in self.cluster.workers:
            plan.rebuild()
            self._overloaded.clear()
        if worker.id in self.cluster.workers:
            bin_ = plan.book.bin_of(worker)
            plan.book.touch(bin_)
            if update.overload_bytes(plan, bin_) > 0:
                self._overloaded[bin_] = None

    def epoch(self) -> None:
        """See `Policy.epoch`."""
        self._judge_overloads()
        self._fill_holes()
        self.plan.carry_out_all()

    # ---- the parts of an operation

    def _leave(self, request: Request, reason: Reason) -> bool:
        """Move a running request off its worker; return True if it leaves."""
        plan = self.plan
        if request.destination is not None:
            return False
        former, bin_ = plan.book.forget(request)
        plan.note_hole(bin_, former.klass)
        item = plan.book.new_item(request)
        left = allocate.allocate(plan, item, reason, avoid=bin_)
        if not left:
            plan.book.put_in(item, bin_)
        self._end_operation()
        if request in plan.held:
            plan.carry_out_all()  # a drain does not wait for the epoch
            left = request.worker is not bin_.worker or request.destination is not None
        return left

    def _resize(self, grown: list[Request]) -> tuple[dict[Bin, None], list[tuple[Item, SizeClass]]]:
        """Apply the new sizes; return the bins, and the items that outgrew their class with the new class."""
        book = self.plan.book
        tiny_bytes = book.limits.tiny_bytes
        bins: dict[Bin, None] = {}
        groups: dict[Item, None] = {}
        changed: list[tuple[Item, SizeClass]] = []
        for request in grown:
            item = book.item_of.get(request)
            if item is None or item.bin is None:
                continue
            projected_bytes = book.projected(request)
            item.resize(request, projected_bytes)
            self.plan.regrow(request)
            if request.worker is not None:
                book.touch(book.bin_of(request.worker))  # not the item's bin, if the request is on its way there
            bins[item.bin] = None
            if not item.grouped:
                klass = class_of_single(projected_bytes, book.limits)
                if klass is not item.klass:
                    changed.append((item, klass))
            elif projected_bytes > tiny_bytes:
                single = book.split_off(item, [request])
                if single.klass is not T:
                    changed.append((single, single.klass))
                    single.klass = T
            else:
                groups[item] = None
        for group in groups:
            if group.bin is not None:
                book.regroup(group)
        for bin_ in bins:
            book.touch(bin_)
        return bins, changed

    def _judge_overloads(self) -> None:
        """Shed items from every overloaded bin; bins that stay overloaded are tried again at each epoch."""
        for bin_ in list(self._overloaded):
            update.shed(self.plan, bin_)
            if update.overload_bytes(self.plan, bin_) <= 0:
                del self._overloaded[bin_]

    def _end_operation(self) -> None:
        if not self._batching:
            self._fill_holes()

    def _fill_holes(self) -> None:
        plan = self.plan
        budget = 64 * (len(plan.holes) + 1)
        while plan.holes and budget:
            budget -= 1
            bin_, klass = next(iter(plan.holes))
            del plan.holes[bin_, klass]
            settle.settle(plan, bin_)
        # With moves in flight, full slots or too few workers, two bins can pass an item back and forth: the next
        # operation continues from there.
        assert not plan.holes or not self._is_promised(), "settling does not end"
        plan.holes.clear()

    def _is_promised(self) -> bool:
        """Return True if the theorem holds for the present state: instant moves, and enough equal workers."""
        cluster, largest_bytes = self.cluster, self.cluster.roster.largest_capacity_bytes
        active = cluster.active.values()
        alike = all(w.capacity_bytes == largest_bytes and w.count < w.slots and not w.shared_bytes for w in active)
        enough = cluster.sleeping(largest_bytes) is not None and not cluster.draining and not len(cluster.waiting)
        free = not any(request.pinned for request in cluster.requests.values())
        return self.plan.instant and alike and enough and free
