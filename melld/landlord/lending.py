"""Lending on one device: which instance gets free granules, which one gives them up, and what schedulers learn.

    capacity = promised - Σ of the others' claims = granted + free + Σ of the others' surplus

Events are serial, and every scheduler's decision is told (`KvNeeded`) before the next is made: no byte is promised
twice.  What nobody needs stays where it is, because prefix caches are warm there.
"""

from collections.abc import Callable

from melld.engine.fleet.life import Event, Intent
from melld.landlord.events import GrantKv, LandlordCommand, LoadModel, OfferCapacity, TakeKv, Why
from melld.landlord.instance import House, Instance
from melld.landlord.instance import InstanceState as S

SERVING = (S.READY, S.DRAINING)
TAKE_DEADLINE_S = 2.0
STUCK_S = 5.0
"""How long an instance that could not return what it was asked for is left alone."""
LEAST_PER_S = 1e-6
"""A model's rate counts as at least so much."""
SPARE_PART = 8
"""At least one part in this many of a surplus is taken, so that takes are fewer and larger."""


class Lender:
    """Lends granules.  `tell` takes the commands."""

    def __init__(self, tell: Callable[[LandlordCommand], None]) -> None:
        self._tell = tell

    def settle(self, house: House, now_s: float) -> None:
        """Move the device's granules to where they are needed, as far as possible now."""
        for one in house.present:
            if one.state is S.CLEARING:
                self._reserve(one, now_s)
        lacks = self._grant(house) + house.ledger.debt
        self._take(house, lacks - sum(one.taking for one in house.instances), now_s)
        for one in house.present:
            reserved = house.ledger.resident(one.id) == one.model.resident_bytes
            if one.state is S.CLEARING and reserved and not house.ledger.debt:
                one.become(Intent.IN_SERVICE, now_s, Event.WAKE)
                self._tell(LoadModel(one.id, Why.WANTED))

    def offer(self, instance: Instance, granules: int) -> None:
        """Tell the instance's scheduler its capacity there, if that has changed."""
        offered = granules * instance.usable_bytes, instance.start_s
        if offered != instance.offered:
            instance.offered = offered
            self._tell(OfferCapacity(instance.id, Why.ROOM, *offered))

    def _reserve(self, instance: Instance, now_s: float) -> None:
        """Promise memory to the weights as soon as the others' claims allow."""
        ledger, resident_bytes = instance.house.ledger, instance.model.resident_bytes
        if ledger.resident(instance.id) == resident_bytes:
            return
        claims = sum(one.claim(now_s) for one in instance.house.instances if one is not instance)
        if ledger.has_room(instance.id, resident_bytes, claims + 1):
            ledger.reside(instance.id, resident_bytes)

    def _grant(self, house: House) -> int:
        """Grant free granules to instances that lack them; return what is still lacking."""
        short = [one for one in house.instances if one.state in SERVING and one.need > one.granted]
        if len(short) > 1:
            short.sort(key=_share)
        lacking = 0
        for one in short:
            lack = one.need - one.granted
            count = 0 if house.ledger.debt else min(lack, house.ledger.free)
            if count:
                self._tell(GrantKv(one.id, Why.ROOM, house.ledger.grant(one.id, count)))
            lacking += lack - count
        return lacking

    def _take(self, house: House, lacks: int, now_s: float) -> None:
        """Take what is lacking, from the largest surplus first."""
        if lacks <= 0:
            return
        serving = [one for one in house.instances if one.state in SERVING]
        givers = [one for one in serving if not one.taking and now_s >= one.stuck_until_s]
        while lacks > 0 and givers:
            giver = max(givers, key=lambda one: one.granted - one.need)
            surplus = giver.granted - giver.need
            if surplus <= 0:
                return
            givers.remove(giver)
            giver.taking = max(min(surplus, lacks), surplus // SPARE_PART)
            lacks -= giver.taking
            why = Why.WEIGHTS if house.ledger.debt else Why.SHORT
            self._tell(TakeKv(giver.id, why, giver.taking, TAKE_DEADLINE_S))

    def returned(self, instance: Instance, granules: tuple[int, ...], now_s: float) -> None:
        """Take back what the instance returned; if that was not everything, wait before asking again."""
        asked, instance.taking = instance.taking, 0
        if instance.house.ledger.give_back(instance.id, granules) < asked:
            instance.stuck_until_s = now_s + STUCK_S


def _share(instance: Instance) -> float:
    """Return the instance's recent use relative to its weight and rate: the least is served first."""
    model = instance.model
    return instance.mean_bytes / (model.declared.weight * max(model.demand.rate_per_s, LEAST_PER_S))
