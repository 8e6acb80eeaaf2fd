"""Devices that several models share, as the status tells them."""

from collections.abc import Mapping

from melld.control.status import DeviceStatus, TenantStatus
from melld.engine.fleet.arena import Arena
from melld.ids import DeviceName
from melld.landlord.instance import House
from melld.landlord.landlord import Landlord


def devices(landlord: Landlord, arenas: Mapping[DeviceName, Arena]) -> tuple[DeviceStatus, ...]:
    """Return how each device's memory is divided."""
    return tuple(_device(house, arenas.get(house.name)) for house in landlord.houses.values())


def _device(house: House, arena: Arena | None) -> DeviceStatus:
    ledger = house.ledger
    return DeviceStatus(
        device=house.name,
        memory_bytes=ledger.memory_bytes,
        free_bytes=ledger.free * ledger.granule_bytes,
        arena_bytes=arena.resident_bytes if arena is not None else None,
        models=tuple(
            TenantStatus(
                model=one.model.name,
                worker=one.id,
                state=one.state,
                resident_bytes=ledger.resident(one.id),
                granted_bytes=ledger.granted(one.id) * ledger.granule_bytes,
                used_bytes=one.used_bytes,
            )
            for one in house.instances
        ),
    )
