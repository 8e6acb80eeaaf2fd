"""MELL's plan: passes decisions to the Cluster at once, or holds moves back until the epoch (batching).

Owns the moves that are decided but not carried out.  Never decides where items go.

Held-back moves count in the plan at once (`Bin.planned_bytes`).  A request with two held-back moves makes one move, to
the last destination, and none if it returns or ends.  Placing is never held back.
"""

import msgspec

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.fit import roomiest_fit
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.book import BinBook
from melld.scheduler.policies.mell.classes import SizeClass
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Duty, Request


class HeldMove(msgspec.Struct):
    """A move held back until the epoch: the request's bytes count on `destination` in the plan."""

    source: Bin
    destination: Bin
    kv_bytes: int
    reason: Reason
    aside: bool = False  # it has made a detour already, to break a cycle


class MellPlan:
    """The book, and the execution of its decisions as commands."""

    def __init__(self, cluster: Cluster, *, batching: bool) -> None:
        self.cluster = cluster
        self._batching = batching
        self.book = BinBook(cluster)
        self.held: dict[Request, HeldMove] = {}
        self.holes: dict[tuple[Bin, SizeClass], None] = {}
        self.instant = cluster.settings.instant_moves
        self.may_evict = True
        self.items_moved = 0

    # ---- asking

    def takes(self, bin_: Bin, item: Item) -> bool:
        """Return True if the item can be planned for the bin now."""
        if bin_.worker.state is not Duty.ACTIVE or self.book.free_slots(bin_) < len(item.sizes):
            return False
        return self.book.free_bytes(bin_) >= item.projected_bytes or self._fits_alone(bin_, item)

    def ready(self, bin_: Bin, item: Item) -> bool:
        """Return True if the item can go there now; carry out the held-back moves that make room for a placement."""
        request = next(iter(item.sizes))
        if request.worker is not None or self.cluster.fits(bin_.worker, request.kv_bytes):
            return True
        self._carry_out_from(bin_)
        if not self.cluster.fits(bin_.worker, request.kv_bytes):
            self.carry_out_all()
        return self.takes(bin_, item) and self.cluster.fits(bin_.worker, request.kv_bytes)

    def _fits_alone(self, bin_: Bin, item: Item) -> bool:
        """Return True for a single request within the capacity of an empty worker, which needs no horizon."""
        if len(item.sizes) != 1 or bin_.worker.count + bin_.planned_count:
            return False
        request = next(iter(item.sizes))
        return request.kv_bytes <= bin_.worker.capacity_bytes

    def note_hole(self, bin_: Bin, klass: SizeClass) -> None:
        """Note that an item of the class has left the bin; the rules are applied to it now or at the epoch."""
        if bin_.items:
            self.holes[bin_, klass] = None

    # ---- deciding

    def place(self, item: Item, bin_: Bin, reason: Reason) -> None:
        """Put a waiting request's item into the bin, or move a placed item there."""
        requests = list(item.sizes)
        if item.bin is not None:
            self.book.take_out(item)
            self.items_moved += 1
        self.book.put_in(item, bin_)
        for request in requests:
            self._send(request, bin_, reason)

    def join(self, request: Request, group: Item, reason: Reason) -> None:
        """Place the waiting tiny request in the group."""
        bin_ = group.bin
        assert bin_ is not None
        self.book.join(request, group)
        self._send(request, bin_, reason)

    def _send(self, request: Request, bin_: Bin, reason: Reason) -> None:
        self.drop(request)
        source = request.worker
        if source is bin_.worker:
            return
        if source is None or not self._batching:
            self._carry_out(request, bin_, reason)
        else:
            held = HeldMove(self.book.bin_of(source), bin_, request.kv_bytes, reason)
            self.held[request] = held
            self._count(held, 1)

    def _carry_out(self, request: Request, bin_: Bin, reason: Reason) -> None:
        source = request.worker
        self.cluster.assign(request, bin_.worker, reason)
        self.book.touch(bin_)
        if source is not None:
            self.book.touch(self.book.bin_of(source))
        if request.destination is not None:
            self.book.item_of[request].moving += 1

    def send_at_once(self, request: Request, bin_: Bin, reason: Reason) -> None:
        """Move the running request there now as a separate item, on a decision from outside MELL."""
        self.drop(request)
        former, left = self.book.forget(request)
        self.note_hole(left, former.klass)
        self.book.put_in(self.book.new_item(request), bin_)
        self._carry_out(request, bin_, reason)

    def new_bin(self, item: Item, reason: Reason, avoid: Bin | None = None) -> Bin | None:
        """Return an empty bin for the item: one that is awake, else a woken one, else None."""
        self.book.settle_orders()
        for bin_ in self.book.vacant:
            if bin_ is not avoid and self.takes(bin_, item):
                return bin_
        kv_bytes = sum(request.kv_bytes for request in item.sizes)
        worker = self.cluster.sleeping(kv_bytes)
        if worker is None or worker.slots < len(item.sizes):
            return None
        self.cluster.activate(worker, reason)
        bin_ = self.book.bin_of(worker)
        self.book.touch(bin_)
        return bin_ if self.takes(bin_, item) else None

    # ---- held-back moves

    def drop(self, request: Request) -> None:
        """Drop the request's held-back move, if there is one."""
        held = self.held.pop(request, None)
        if held is not None:
            self._count(held, -1)

    def regrow(self, request: Request) -> None:
        """Update the bytes of a grown request's held-back move."""
        held = self.held.get(request)
        if held is not None:
            self._count(held, -1)
            held.kv_bytes = request.kv_bytes
            self._count(held, 1)

    def _count(self, held: HeldMove, sign: int) -> None:
        held.destination.planned_bytes += sign * held.kv_bytes
        held.destination.planned_count += sign
        self.book.touch(held.destination)
        if self.instant:
            held.source.planned_bytes -= sign * held.kv_bytes
            held.source.planned_count -= sign
            self.book.touch(held.source)

    def _carry_out_from(self, bin_: Bin) -> None:
        """Carry out the held-back moves that make room in the bin."""
        for request, held in list(self.held.items()):
            if held.source is bin_:
                self._carry_out_if_fits(request)

    def carry_out_all(self) -> None:
        """Carry out the held-back moves, in an order in which each fits.

        If the rest wait for each other in a cycle, one of them makes a detour over a worker with room.  If no worker
        has room, they are cancelled.
        """
        while self.held:
            carried_out = sum(self._carry_out_if_fits(request) for request in list(self.held))
            if not carried_out and not self._step_aside():
                break
        for request in list(self.held):
            self.call_off(request)

    def _carry_out_if_fits(self, request: Request) -> bool:
        held = self.held[request]
        if not self.cluster.fits(held.destination.worker, request.kv_bytes):
            return False
        self.drop(request)
        self._carry_out(request, held.destination, held.reason)
        return True

    def _step_aside(self) -> bool:
        """Break a cycle of instant moves: move the smallest request to a worker with room first."""
        waiting = [request for request, held in self.held.items() if not held.aside]
        if not self.instant or not waiting:
            return False
        request = min(waiting, key=lambda request: (request.kv_bytes, request.sequence))
        held = self.held[request]
        roomiest = roomiest_fit(self.cluster, request)
        if roomiest is None:
            roomiest = self.cluster.sleeping(request.kv_bytes)
            if roomiest is None:
                return False
            self.cluster.activate(roomiest, Reason.CIRCLE)
        self.drop(request)
        self._carry_out(request, self.book.bin_of(roomiest), Reason.CIRCLE)
        held.source = self.book.bin_of(roomiest)
        held.aside = True
        self.held[request] = held
        self._count(held, 1)
        return True

    def call_off(self, request: Request) -> None:
        """Cancel the request's move: it stays on its worker as a separate item."""
        self.drop(request)
        worker = request.worker
        assert worker is not None
        self.book.forget(request)
        self.book.put_in(self.book.new_item(request), self.book.bin_of(worker))

    def rebuild(self) -> None:
        """Rebuild the book from the Cluster; cancel all held-back moves."""
        self.book = book = BinBook(self.cluster)
        self.held.clear()
        self.holes.clear()
        for worker in [*self.cluster.active.values(), *self.cluster.draining.values()]:
            book.touch(book.bin_of(worker))
            requests = [r for r in worker.requests.values() if r.destination is None]
            for request in [*requests, *worker.arriving.values()]:
                book.put_in(book.new_item(request), book.bin_of(worker))
        for bin_ in book.bins.values():
            self.note_hole(bin_, SizeClass.T)
