"""MELL's decisions on their way to the Cluster: carried out at once, or held back until the epoch (batching).

Owns the moves that are decided but not carried out.  Never decides who goes where.

Held-back moves count in the plan at once (`Bin.planned_bytes`); a request moved twice is moved once, from where it
is to where it ends, and one that comes back or ends is not moved at all.  Placing is never held back.
"""

import msgspec

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.mell.bins import Bin, Item
from melld.scheduler.policies.mell.book import Book
from melld.scheduler.policies.mell.classes import SizeClass
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, WorkerState


class MellSettings(msgspec.Struct, frozen=True):
    """What may be chosen about MELL.

    `literal`: the paper's text as printed, for comparison.  `batching`: moves wait for the epoch.
    `eager`: a T-bin takes from the latest one whenever something fits, not only when it is less than 75 % full:
    fuller workers for more moves.  (The text as printed does so by itself.)
    The priority of a GPU is `workload_weight` x (its idle share of bytes, less its share of slots taken) +
    `distance_weight` x (1 if it is on the machine that the request is on).
    """

    batching: bool = True
    literal: bool = False
    eager: bool = False
    workload_weight: float = 1.0
    distance_weight: float = 0.1


class HeldMove(msgspec.Struct):
    """A move that is decided and waits: the request's bytes count on `destination` in the plan."""

    source: Bin
    destination: Bin
    kv_bytes: int
    reason: Reason
    aside: bool = False  # it has stepped aside already, to break a circle


class Plan:
    """The book, and the way from it to commands."""

    def __init__(self, cluster: Cluster, settings: MellSettings) -> None:
        self.cluster = cluster
        self.settings = settings
        self.book = Book(cluster)
        self.held: dict[Request, HeldMove] = {}
        self.holes: dict[tuple[Bin, SizeClass], int] = {}
        self.instant = cluster.settings.instant_moves
        self.may_evict = True
        self.items_moved = 0

    # ---- asking

    def takes(self, bin_: Bin, item: Item) -> bool:
        """Whether the item could be planned for the bin now."""
        if bin_.worker.state is not WorkerState.ACTIVE or self.book.free_slots(bin_) < len(item.sizes):
            return False
        return self.book.free_bytes(bin_) >= item.reckoned_bytes or self._fits_alone(bin_, item)

    def ready(self, bin_: Bin, item: Item) -> bool:
        """Whether the item may go there now: placing is not held back, so the moves that make room come first."""
        request = next(iter(item.sizes))
        if request.worker is not None or self.cluster.fits(bin_.worker, request.kv_bytes):
            return True
        self._carry_out_from(bin_)
        if not self.cluster.fits(bin_.worker, request.kv_bytes):
            self.carry_out_all()
        return self.takes(bin_, item) and self.cluster.fits(bin_.worker, request.kv_bytes)

    def _fits_alone(self, bin_: Bin, item: Item) -> bool:
        """An empty worker needs no horizon, so it takes any one request up to its capacity."""
        if len(item.sizes) != 1 or bin_.worker.count + bin_.planned_count:
            return False
        request = next(iter(item.sizes))
        return request.kv_bytes <= bin_.worker.capacity_bytes

    def note_hole(self, bin_: Bin, klass: SizeClass) -> None:
        """An item of the class has left the bin: the rules are to be applied to it, now or at the epoch."""
        if bin_.items:
            self.holes[bin_, klass] = bin_.lives

    # ---- deciding

    def place(self, item: Item, bin_: Bin, reason: Reason) -> None:
        """Put the waiting request's item into the bin, or move the item there."""
        requests = list(item.sizes)
        if item.bin is not None:
            self.book.take_out(item)
            self.items_moved += 1
        self.book.put_in(item, bin_)
        for request in requests:
            self._send(request, bin_, reason)

    def join(self, request: Request, group: Item, reason: Reason) -> None:
        """Place the waiting tiny request where the group is."""
        bin_ = group.bin
        assert bin_ is not None
        self.book.join(request, group)
        self._send(request, bin_, reason)

    def _send(self, request: Request, bin_: Bin, reason: Reason) -> None:
        self.drop(request)
        source = request.worker
        if source is bin_.worker:
            return
        if source is None or not self.settings.batching:
            self._carry_out(request, bin_, reason)
        else:
            held = HeldMove(self.book.bin_of(source), bin_, request.kv_bytes, reason)
            self.held[request] = held
            self._reckon(held, 1)

    def _carry_out(self, request: Request, bin_: Bin, reason: Reason) -> None:
        source = request.worker
        self.cluster.assign(request, bin_.worker, reason)
        self.book.touch(bin_)
        if source is not None:
            self.book.touch(self.book.bin_of(source))
        if request.destination is not None:
            self.book.item_of[request].moving += 1

    def send_at_once(self, request: Request, bin_: Bin, reason: Reason) -> None:
        """Move the running request there now, as an item of its own: somebody else has decided."""
        self.drop(request)
        former, left = self.book.forget(request)
        self.note_hole(left, former.klass)
        self.book.put_in(self.book.new_item(request), bin_)
        self._carry_out(request, bin_, reason)

    def new_bin(self, item: Item, reason: Reason, avoid: Bin | None = None) -> Bin | None:
        """An empty bin for the item: one that is awake, else one that is woken, else None."""
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
        """The request's held-back move, if there is one, is needless."""
        held = self.held.pop(request, None)
        if held is not None:
            self._reckon(held, -1)

    def regrow(self, request: Request) -> None:
        """The request has grown: so has what its held-back move counts."""
        held = self.held.get(request)
        if held is not None:
            self._reckon(held, -1)
            held.kv_bytes = request.kv_bytes
            self._reckon(held, 1)

    def _reckon(self, held: HeldMove, sign: int) -> None:
        held.destination.planned_bytes += sign * held.kv_bytes
        held.destination.planned_count += sign
        self.book.touch(held.destination)
        if self.instant:
            held.source.planned_bytes -= sign * held.kv_bytes
            held.source.planned_count -= sign
            self.book.touch(held.source)

    def _carry_out_from(self, bin_: Bin) -> None:
        """Carry out, of the moves held back, those that make room in the bin."""
        for request, held in list(self.held.items()):
            if held.source is bin_ and self.cluster.fits(held.destination.worker, request.kv_bytes):
                self.drop(request)
                self._carry_out(request, held.destination, held.reason)

    def carry_out_all(self) -> None:
        """Carry out the moves held back, in an order in which each fits.

        Those in a circle wait for each other: one of them steps aside to a worker with room, and goes on from there.
        If there is none, what is left is called off.
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
        """Break a circle of instant moves: the smallest request goes where there is room for now."""
        waiting = [request for request, held in self.held.items() if not held.aside]
        if not self.instant or not waiting:
            return False
        request = min(waiting, key=lambda request: (request.kv_bytes, request.sequence))
        held = self.held[request]
        others = (worker for worker in self.cluster.room.roomiest() if worker is not request.worker)
        roomiest = next(others, None)
        if roomiest is None or not self.cluster.fits(roomiest, request.kv_bytes):
            roomiest = self.cluster.sleeping(request.kv_bytes)
            if roomiest is None:
                return False
            self.cluster.activate(roomiest, Reason.CIRCLE)
        self.drop(request)
        self._carry_out(request, self.book.bin_of(roomiest), Reason.CIRCLE)
        held.source = self.book.bin_of(roomiest)
        held.aside = True
        self.held[request] = held
        self._reckon(held, 1)
        return True

    def call_off(self, request: Request) -> None:
        """The request stays on its worker after all: an item of its own there."""
        self.drop(request)
        worker = request.worker
        assert worker is not None
        self.book.forget(request)
        self.book.put_in(self.book.new_item(request), self.book.bin_of(worker))

    def rebuild(self) -> None:
        """Begin anew from what the Cluster has; moves that are held back are called off."""
        self.book = book = Book(self.cluster)
        self.held.clear()
        self.holes.clear()
        for worker in [*self.cluster.active.values(), *self.cluster.draining.values()]:
            book.touch(book.bin_of(worker))
            requests = [r for r in worker.requests.values() if r.destination is None]
            for request in [*requests, *worker.arriving.values()]:
                book.put_in(book.new_item(request), book.bin_of(worker))
        for bin_ in book.bins.values():
            self.note_hole(bin_, SizeClass.T)
