"""Chooses where a model is loaded, and which instances leave for it.

    1  awake devices with room          2  awake devices once idle, unpinned models have left (longest unused first)
    3  devices that sleep               4  devices that are full by time, if there is nothing else

Among equals: what wakes soonest, then the greatest gain in F (`estimate`), then best fit.  A device is full if a round
of steps would take too long, or if prompts alone would fill it.  A loaded model stays for twice its load time; for one
more instance of a model that is served only those leave that have been idle for several times what their return takes.
"""

from collections.abc import Iterator, Mapping

from melld.ids import DeviceName
from melld.landlord.estimate import ModelDemand, prefill_part, served_per_s, token_s
from melld.landlord.instance import ABSENT, PRESENT, Choice, DeclaredModel, House, Instance
from melld.landlord.instance import InstanceState as S

BUSY_PART = 0.9
"""Part of a device's time that prompts may take."""
STAY_TIMES = 2.0
"""How many times its load time a loaded model stays at least."""
QUIET_TIMES = 4.0
"""How many times its return time an instance must be idle to be thought unneeded."""
SLOWDOWN = 6.0
"""Without a target: the longest round of steps, in steps of the slowest model alone."""


class Housing:
    """Chooses devices for models.  `itl_target_s`: what a round of steps may take; None: see `SLOWDOWN`."""

    def __init__(self, houses: Mapping[DeviceName, House], itl_target_s: float | None) -> None:
        self._houses = houses
        self._itl_target_s = itl_target_s

    def choose(self, model: DeclaredModel, now_s: float) -> Choice | None:
        """Return where to load the model now, or None if it fits nowhere."""
        fitting = [self._fitting(one, now_s) for one in model.instances if one.state in ABSENT]
        return min((choice for choice in fitting if choice is not None), key=self._rank, default=None)

    def _fitting(self, instance: Instance, now_s: float) -> Choice | None:
        """Return the instance with the fewest victims that make room for its weights and its first request."""
        house, model = instance.house, instance.model
        enough = max(1, -(-model.first_bytes // instance.usable_bytes))
        claims = sum(one.claim(now_s) for one in house.instances if one is not instance)
        granules = house.promised - claims - instance.weights
        victims: list[Instance] = []
        for victim in self.idle(house, now_s):
            if granules >= enough:
                break
            if model.is_served and not self.is_quiet(victim, now_s):
                continue
            victims.append(victim)
            granules += victim.weights + victim.claim(now_s)
        return Choice(instance, tuple(victims), granules) if granules >= enough else None

    def idle(self, house: House, now_s: float) -> Iterator[Instance]:
        """Yield instances that may leave at once, the longest unused first."""
        idle = [
            one for one in house.instances if one.state is S.READY and not one.requests and self.may_leave(one, now_s)
        ]
        yield from sorted(idle, key=lambda one: (one.idle_since_s, one.id))

    def is_quiet(self, instance: Instance, now_s: float) -> bool:
        """Return True if the idle instance is hardly needed: idle for long, or its model is loaded twice."""
        others = any(one.state in PRESENT for one in instance.model.instances if one is not instance)
        return others or now_s - instance.idle_since_s >= QUIET_TIMES * instance.return_s

    def may_leave(self, instance: Instance, now_s: float) -> bool:
        """Return True unless the instance is all that serves a pinned model, or was just loaded."""
        others = any(one.state is S.READY for one in instance.model.instances if one is not instance)
        is_spare = others or not instance.model.declared.pinned
        return is_spare and now_s - instance.since_s >= STAY_TIMES * instance.took_s

    def _rank(self, choice: Choice) -> tuple[float, ...]:
        house = choice.instance.house
        staying = [one.model.demand for one in house.present if one not in choice.victims]
        joined = [*staying, choice.instance.model.demand]
        if not house.is_awake:
            order = 3
        elif self.is_full(joined):
            order = 4
        else:
            order = 2 if choice.victims else 1
        kv_bytes = house.ledger.granule_bytes * max(house.promised, 0)
        gain = served_per_s(joined, kv_bytes) - served_per_s(staying, kv_bytes)
        return order, choice.instance.start_s, -round(gain, 3), choice.granules

    def is_full(self, demands: list[ModelDemand]) -> bool:
        """Return True if models with these demands together would be too slow on one device."""
        target_s = self._itl_target_s
        if target_s is None:
            target_s = SLOWDOWN * max(demand.step_s for demand in demands)
        return token_s(demands) > target_s or prefill_part(demands) > BUSY_PART

    def swap_victim(self, model: DeclaredModel, now_s: float) -> tuple[Instance, Instance] | None:
        """Return the least busy instance that could make room for the model, and the instance to load instead."""
        pairs = []
        for one in model.instances:
            if one.state not in ABSENT:
                continue
            for victim in one.house.instances:
                if victim.state is not S.READY or not self.may_leave(victim, now_s):
                    continue
                others = sum(other.claim(now_s) for other in one.house.instances if other is not victim)
                if one.house.promised + victim.weights - others - one.weights >= 1:
                    pairs.append((victim.used_bytes, victim.id, victim, one))
        return min(pairs, key=lambda pair: pair[:2])[2:] if pairs else None

    def emptied(self, now_s: float) -> list[tuple[Instance, Instance | None]] | None:
        """Return how to empty the least used device: each instance with its successor (None: it is idle), or None.

        An heir serves already or can be loaded on another device that is awake.
        """
        awake = [house for house in self._houses.values() if house.is_awake]
        if len(awake) < 2:
            return None
        source = min(awake, key=lambda house: (sum(one.used_bytes for one in house.instances), house.name))
        others = [house for house in awake if house is not source]
        room = {house.name: house.promised - sum(one.claim(now_s) for one in house.instances) for house in others}
        demands = {house.name: [one.model.demand for one in house.present] for house in others}
        plan: list[tuple[Instance, Instance | None]] = []
        for one in source.instances:
            if one.state in (S.CLEARING, S.LOADING):
                return None
            if one.state is not S.READY:
                continue
            if not one.requests and not one.model.declared.pinned and self.is_quiet(one, now_s):
                plan.append((one, None))
            elif (heir := self._heir(one, room, demands)) is not None:
                plan.append((one, heir))
            else:
                return None
        return plan

    def _heir(
        self, leaver: Instance, room: dict[DeviceName, int], demands: dict[DeviceName, list[ModelDemand]]
    ) -> Instance | None:
        for one in sorted(leaver.model.instances, key=lambda one: (one.state not in PRESENT, one.house.name)):
            house = one.house.name
            if house not in room or one.state not in PRESENT | ABSENT:
                continue
            present = one.state in PRESENT
            granules = leaver.need + (0 if present else one.weights)
            joined = demands[house] if present else [*demands[house], one.model.demand]
            if room[house] >= granules and not self.is_full(joined):
                room[house] -= granules
                demands[house] = joined
                return one
        return None
