"""Models being removed from a running daemon: each is unloaded and forgotten once its calls have ended.

Owns when that is.  The last step of its tasks and processes is its owner's.
"""

import asyncio
from collections.abc import Callable, Mapping

from melld.daemon.town.tenant import Tenant
from melld.ids import WorkerId
from melld.landlord import events as e
from melld.landlord.instance import UNLOADED, Instance, InstanceState


class Departures:
    """Models being removed.  `hear` takes events for the Landlord; `forget` drops a model once it is gone."""

    def __init__(
        self,
        instances: Mapping[WorkerId, Instance],
        clock: Callable[[], float],
        hear: Callable[[e.AnyLandlordEvent], None],
        forget: Callable[[Tenant], None],
    ) -> None:
        self._instances = instances
        self._clock = clock
        self._hear = hear
        self._forget = forget

    async def dismiss(self, tenant: Tenant) -> None:
        """Wait until a model that new calls cannot find has been removed, once its calls have ended.

        Those that wait for its load, or for a place, are refused.
        """
        tenant.model.failed("removed from the configuration", 0.0)
        tenant.leaves = asyncio.get_running_loop().create_future()
        await tenant.leaves

    def look(self, tenant: Tenant) -> None:
        """Unload a departing model, as far as its calls allow."""
        if tenant.leaves is None or tenant.model.calls or tenant.fleet.live:
            return
        instances = [self._instances[worker] for worker in tenant.fleet.places]
        for one in instances:
            if one.state is InstanceState.CLEARING and tenant.fleet.places[one.id].process is None:
                self._hear(e.ModelGone(self._clock(), one.id))
            elif one.state not in UNLOADED:
                self._hear(e.UnloadAsked(self._clock(), one.id))
        if all(one.state in UNLOADED for one in instances):
            self._hear(e.ModelRemoved(self._clock(), tenant.key))
            self._forget(tenant)
            tenant.leaves.set_result(None)
