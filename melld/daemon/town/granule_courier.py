"""Carries granules between the Landlord and workers: grants, takes, and scrubbing.

Owns the arenas, and who was told of which granules.  Decides nothing.  A worker with KV memory of its own is told of
none.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from melld.control.status import DeviceStatus, TenantStatus
from melld.daemon.town.tenant import Tenant
from melld.engine.fleet.arena import AnyArena
from melld.engine.wire import messages as wire
from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.division import Division
from melld.landlord.instance import House


class GranuleCourier:
    """The granules of all devices.  `hear` takes events for the Landlord."""

    def __init__(self, clock: Callable[[], float], hear: Callable[[e.AnyLandlordEvent], None]) -> None:
        self.arenas: Mapping[DeviceName, AnyArena] = {}
        self.division = Division()
        self.takes: Counter[ModelName] = Counter()
        self.moved_blocks: Counter[ModelName] = Counter()
        self._clock = clock
        self._hear = hear
        self._granted: dict[WorkerId, set[int]] = {}

    def grant(self, tenant: Tenant, command: e.GrantKv) -> None:
        """Let the worker use these granules, unless its KV memory is its own."""
        if tenant.lends:
            self._granted.setdefault(command.worker, set()).update(command.granules)
            tenant.fleet.grant(command.worker, command.granules, command.cause)

    def take(self, tenant: Tenant, command: e.TakeKv) -> None:
        """Take granules from the worker."""
        self.takes[tenant.name] += 1
        tenant.fleet.take(command.worker, command.granules, command.deadline_s, command.cause)

    def returned(self, tenant: Tenant, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        """Report granules that the worker has given back, late or not."""
        self.moved_blocks[tenant.name] += returned.moved_blocks
        self._granted.get(worker, set()).difference_update(returned.granules)
        self._hear(e.KvReturned(self._clock(), worker, returned.granules))

    async def scrub(self, worker: WorkerId, device: DeviceName) -> None:
        """Free the memory of a worker that has ended or dozes."""
        if granules := tuple(self._granted.get(worker, ())):
            await self.arenas[device].scrub(granules)
        self._granted.pop(worker, None)  # what was granted meanwhile has not reached it

    def status_of(self, house: House, tenants: Mapping[WorkerId, Tenant]) -> DeviceStatus:
        """Return how a device's memory is divided; `tenants`: by their workers."""
        ledger, arena = house.ledger, self.arenas.get(house.name)
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
