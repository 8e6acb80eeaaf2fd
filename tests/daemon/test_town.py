"""Several models under random histories: whatever happens, every request completes."""

import os
import random
from types import SimpleNamespace

import pytest

from melld.daemon.town.landlord import LandlordShell
from melld.daemon.town.tenant import Tenant
from melld.engine.fleet.life import WorkerLife
from melld.ids import WorkerId
from melld.landlord.events import OfferCapacity, Why
from melld.landlord.landlord import Landlord
from tests.daemon.town_history import CHOICES, play

HISTORIES = int(os.environ.get("MELLD_HISTORIES", "12"))
TOLD = [(2, 60), (16, 60), (17, 60), (198, 90)]
"""Histories that once went wrong."""


@pytest.mark.parametrize(("seed", "length"), [*TOLD, *((1000 + number, 90) for number in range(HISTORIES))])
def test_every_request_of_every_model_completes(seed: int, length: int) -> None:
    """Under deaths, hangs, drains, unloads and failed loads, in any order."""
    chance = random.Random(seed)
    play([chance.randrange(CHOICES) for _ in range(length)])


def test_a_newer_offer_is_not_undone_by_an_older_one() -> None:
    """A scheduler acts on the first part of an offer, which changes what is available."""
    told: list[str] = []
    older, newer = (OfferCapacity(WorkerId("w0"), Why.ROOM, capacity_bytes, 0.0) for capacity_bytes in (9000, 0))

    class Deciding:
        """A model whose scheduler places a request at once, so that the Landlord offers less."""

        driver = SimpleNamespace(is_busy=False)

        def tell(self, offer: OfferCapacity) -> None:
            told.append(f"{offer.capacity_bytes} begins")
            if offer is older:
                shell._offers[offer.worker] = newer
                shell.tell_offers()
            told.append(f"{offer.capacity_bytes} ends")

    shell = LandlordShell(Landlord(), lambda: 0.0)
    shell._by_worker = {older.worker: Deciding()}  # type: ignore[dict-item]
    shell._offers[older.worker] = older
    shell.tell_offers()
    assert told == ["9000 begins", "9000 ends", "0 begins", "0 ends"]


def test_a_scheduler_hears_how_soon_a_worker_serves_before_it_hears_of_room() -> None:
    """It places what waits as soon as there is room, and one that takes a whole load to wake is no sleeper."""
    told: list[str] = []
    place = SimpleNamespace(is_ready=False, life=WorkerLife(WorkerId("w0")))
    fleet = SimpleNamespace(
        places={WorkerId("w0"): place},
        introduce=lambda *_: told.append("introduced"),
        change=lambda _worker, **changes: told.extend(changes),
    )
    tenant = SimpleNamespace(fleet=fleet, _offer=SimpleNamespace(capacity_bytes=9000), lends=True)
    Tenant.tell(tenant, OfferCapacity(WorkerId("w0"), Why.ROOM, 9000, 30.0))  # type: ignore[arg-type]
    assert told == ["introduced", "wake_s", "capacity_bytes"]
