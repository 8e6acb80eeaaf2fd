"""Invariants of the Landlord's records: the tests of the Landlord, the simulator and the daemon check every state."""

from melld.landlord.granules import GranuleLedger
from melld.landlord.instance import ON_DEVICE
from melld.landlord.landlord import Landlord


def check_landlord(landlord: Landlord) -> None:
    """Check that every ledger keeps its law, and no more is granted than each instance may have."""
    for house in landlord.houses.values():
        check_ledger(house.ledger)
        for one in house.instances:
            assert one.state in ON_DEVICE or not house.ledger.granted(one.id), one.id
            assert 0 <= one.taking <= house.ledger.granted(one.id), one.id


def check_ledger(ledger: GranuleLedger) -> None:
    """Check the law at the head of `melld.landlord.granules`."""
    places = [set(ledger._free), set(ledger._closed), *ledger._granted.values()]
    assert sum(map(len, places)) == ledger.count, "a granule is lost, or in two places"
    assert set().union(*places) == set(range(1, ledger.count + 1))
    assert sum(ledger._resident.values()) == ledger._resident_bytes
    assert ledger.open <= ledger.limit or not ledger._free, "granules are free beyond the limit"
    assert ledger.open == ledger.limit or not ledger._closed or ledger.open > ledger.limit
