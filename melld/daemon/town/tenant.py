"""One of several models as the Landlord sees it: its scheduler's counts, its requests' statistics, its granules.

Owns the counts since the last report, what its scheduler is told of its workers, and how far the removal of the model
is.  Decides nothing.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping

from melld.control.status import DeviceStatus, TenantStatus
from melld.daemon.model import ServedModel
from melld.engine.fleet.arena import AnyArena
from melld.engine.fleet.life import Intent, Who
from melld.engine.fleet.place import Offer
from melld.engine.wire import messages as wire
from melld.errors import RequestTooLarge
from melld.ids import ModelName, RequestId, WorkerId
from melld.landlord import events as e
from melld.landlord.events import KvNeeded, ModelLoad, OfferCapacity
from melld.landlord.instance import UNLOADED, DeclaredModel, House, Instance, InstanceState
from melld.scheduler import events

log = logging.getLogger("melld.landlord")
KEPT_OUT_S = 10.0
"""Rest until a worker that an operator keeps out, or a model that has no room, is tried again."""
GROWTH_TIMES = 2
"""How often what requests have just grown by is kept ready: a model's rate is learned from its first answers."""


class Tenant:
    """A model.

    `lends`: its workers use granules; False: each has KV memory of its own, of a fixed size, and is told of none.
    `displaces`: its weights take memory that would be lent.
    """

    def __init__(self, model: ServedModel, block_bytes: int, *, lends: bool, displaces: bool = True) -> None:
        self.model = model
        self.name, self.key = ModelName(model.name), model.key
        self.leaves: asyncio.Future[None] | None = None
        """Done once the model, which was removed, is gone."""
        self.fleet = model.parts.fleet
        self.driver = model.parts.driver
        self.lends = lends
        self._displaces = displaces
        self.block_bytes = block_bytes
        self.loads = self.takes = self.moved_blocks = 0
        """Loads of its workers, takes of KV memory from them, and blocks that were moved for these."""
        self._offer: Offer | None = None
        self._told: dict[WorkerId, tuple[int, int]] = {}
        self._sizes: dict[RequestId, int] = {}
        self._load = ModelLoad()

    # -- what the model does -----------------------------------------------------------------------------------------

    def heard(self, event: events.AnyEvent) -> None:
        """Count an event about the model's requests."""
        load = self._load
        match event:
            case events.RequestArrived():
                load.arrivals += 1
                if event.request in self.model.parts.cluster.requests:  # else it was refused
                    self._sizes[event.request] = event.kv_bytes
            case events.RequestsGrew():
                self._sizes |= {name: size for name, size in event.kv_bytes.items() if name in self._sizes}
            case events.RequestFinished():
                held_bytes = self._sizes.pop(event.request, 0)
                if event.output_tokens:
                    load.ended += 1
                    load.output_tokens += event.output_tokens
                    load.held_bytes += held_bytes
            case events.WorkersPaced():
                for pace in event.paces.values():
                    load.prompts += pace.prompts
                    load.prefill_s += pace.prefill_s
                    load.step_s = pace.step_s or load.step_s

    def take_load(self, instances: Mapping[WorkerId, Instance]) -> ModelLoad:
        """Return what the model did since the last call.  Placed requests wait, too, for memory for its weights."""
        clearing = [worker for worker in self.fleet.places if instances[worker].state is InstanceState.CLEARING]
        held = sum(len(self.fleet.places[worker].held) for worker in clearing)
        load, self._load = self._load, ModelLoad()
        unplaced = self._unplaced()
        load.first_bytes = next(iter(unplaced.values()), 0) if self.lends else 0
        load.waiting = held + len(unplaced) + len(self.model.waiting)
        return load

    def _unplaced(self) -> dict[RequestId, int]:
        """Return the sizes of the requests that have no place."""
        known = self.model.parts.cluster.requests
        return {
            name: known[name].kv_bytes for name, live in self.fleet.live.items() if not live.worker and name in known
        }

    def refuse_what_never_fits(self, declared: DeclaredModel) -> None:
        """Reject requests, and calls to models, that can never fit next to pinned models."""
        for name, kv_bytes in self._unplaced().items():
            if self.lends and kv_bytes > declared.most_bytes:
                self.fleet.requests.end(name, RequestTooLarge(name, kv_bytes, declared.most_bytes))
        if not declared.most_bytes and not declared.is_served and self.model.why_closed() is None:
            why = declared.instances[0].why_too_large
            if why not in self.model.failure:
                log.error("%s: %s", self.name, why)
            self.model.failed(why, KEPT_OUT_S)

    def take_needs(self, now_s: float) -> Iterator[KvNeeded]:
        """Yield the scheduler's count for each worker where it has changed since the last call.

        Calls that came before the front end will be requests on the worker that is there.
        """
        cluster = self.model.parts.cluster
        ahead_bytes = max(cluster.ahead_bytes, self.block_bytes)
        for name, place in self.fleet.places.items():
            known = cluster.workers.get(name)
            used_bytes, count = (known.used_bytes, known.count) if known is not None else (0, 0)
            if place.is_ready:
                count = max(count, self.model.first_calls)
            counted = used_bytes if self.lends else 0, count
            told_bytes, told_count = self._told.get(name, (0, 0))
            if counted != (told_bytes, told_count):
                self._told[name] = counted
                grown_bytes = used_bytes - told_bytes if count == told_count else 0
                growth_bytes = max(count * ahead_bytes, GROWTH_TIMES * grown_bytes) if self.lends else 0
                yield KvNeeded(now_s, name, counted[0], growth_bytes, count)

    # -- what its scheduler is told ----------------------------------------------------------------------------------

    def measured(self, ready: wire.WorkerReady) -> int:
        """Return the memory the worker holds besides the arena; 0: not measured, or irrelevant."""
        if self.lends and ready.arena_failure:
            if ready.geometry.keeps_kv:
                log.warning("%s does not share KV memory with other models: %s", self.name, ready.arena_failure)
            self.lends = False
        has_own = not self.lends and ready.geometry.keeps_kv
        own_bytes = ready.geometry.bytes_for_blocks(ready.total_blocks) if has_own else 0
        return ready.resident_bytes + own_bytes if ready.resident_bytes and self._displaces else 0

    def note_ready(self, ready: wire.WorkerReady, most_bytes: int) -> None:
        """Record a worker's offer; with lending it may hold at most `most_bytes`."""
        capacity_bytes = ready.geometry.bytes_for_blocks(ready.total_blocks)
        if self.lends:
            capacity_bytes = min(capacity_bytes, most_bytes)
        self._offer = Offer(capacity_bytes, ready.max_requests, ready.geometry.block_bytes)

    def tell(self, offer: OfferCapacity) -> None:
        """Tell the model's scheduler a worker's capacity and how soon it could serve.

        Before the model's first load there is no request to place, and what a worker offers is not known.
        """
        place = self.fleet.places[offer.worker]
        if self._offer is None:
            return
        capacity_bytes = offer.capacity_bytes
        if not self.lends:
            capacity_bytes = self._offer.capacity_bytes if capacity_bytes else 0
        if (
            capacity_bytes and (place.is_ready or offer.wake_s) and place.life.wished_by(Who.OPERATOR) is not Intent.OUT
        ):  # else it has just died, which is not told yet
            self.fleet.introduce(offer.worker, self._offer)
        # The capacity comes last: requests are placed there at once, by the time that it takes to wake.
        self.fleet.change(offer.worker, wake_s=offer.wake_s or None)
        self.fleet.change(offer.worker, capacity_bytes=capacity_bytes)

    def drain(self, worker: WorkerId, now_s: float, *, is_reopened: bool) -> None:
        """Have its scheduler stop or resume placing requests on a worker that it knows and no operator drains."""
        intent = Intent.IN_SERVICE if is_reopened else Intent.DRAINING
        self.fleet.places[worker].life.wish(Who.LANDLORD, intent)
        if worker in self.model.parts.cluster.workers and worker not in self.driver.drains.by_worker:
            kind = events.WorkerResumed if is_reopened else events.WorkerDraining
            self.driver.handle(kind(now_s, worker=worker))

    # -- its removal -------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Return once the model, which new calls cannot find, is gone: it goes once its calls have ended.

        Those that wait for its load, or for a place, are refused.
        """
        self.model.failed("removed from the configuration", 0.0)
        self.leaves = asyncio.get_running_loop().create_future()
        await self.leaves

    def departure(self, instances: Mapping[WorkerId, Instance], now_s: float) -> Iterator[e.LandlordEvent]:
        """Yield what the Landlord has to hear next for a model that leaves, as far as its calls allow."""
        if self.leaves is None or self.model.calls or self.fleet.live:
            return
        mine = [instances[worker] for worker in self.fleet.places]
        for one in mine:
            if one.state is InstanceState.LOADING:  # nobody needs the rest of it
                self.fleet.stop_worker(one.id)
            elif one.state is InstanceState.CLEARING and self.fleet.places[one.id].process is None:
                yield e.ModelGone(now_s, one.id)
            elif one.state not in UNLOADED:
                yield e.UnloadAsked(now_s, one.id)
        if all(one.state in UNLOADED for one in mine):
            yield e.ModelRemoved(now_s, self.key)
            self.leaves.set_result(None)


def device_status(house: House, tenants: Mapping[WorkerId, Tenant], arena: AnyArena | None) -> DeviceStatus:
    """Return how a device's memory is divided; `tenants`: by their workers."""
    ledger = house.ledger
    return DeviceStatus(
        device=house.name,
        memory_bytes=ledger.memory_bytes,
        free_bytes=ledger.free * ledger.granule_bytes,
        arena_bytes=arena.resident_bytes if arena is not None else None,
        models=tuple(
            TenantStatus(
                model=tenants[one.id].name,
                worker=one.id,
                state=one.state,
                resident_bytes=ledger.resident(one.id),
                granted_bytes=ledger.granted(one.id) * ledger.granule_bytes,
                used_bytes=one.used_bytes,
            )
            for one in house.instances
        ),
    )
