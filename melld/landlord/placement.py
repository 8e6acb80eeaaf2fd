"""The Landlord's rule of placement: where a model is loaded, which instances leave for it, and when.

    1  awake devices with room          2  awake devices once idle, unpinned models have left (longest unused first)
    3  devices that sleep               4  devices that are full by time, if there is nothing else

Among equals: what wakes soonest, then the greatest gain in F (`estimate`), then best fit.  A device is full if a round
of steps would take too long, or if prompts alone would fill it.  A loaded model stays for twice its load time; for one
more instance of a model that is served only those leave that have been idle for several times what their return takes.
Running requests are never cut: an instance drains first.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from melld.engine.fleet.life import Event, Intent
from melld.ids import DeviceName, WorkerId
from melld.landlord import events
from melld.landlord.estimate import ModelDemand, prefill_part, served_per_s, token_s
from melld.landlord.events import NEVER, LandlordCommand, Why
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
ENDING = frozenset({Why.TOO_LARGE, Why.OPERATOR})
"""Reasons to end what could doze."""
EARNED_TIMES = 4.0
"""To empty a device must have been possible for so many times what it costs: the loads of heirs, and of those that
leave, should they be wanted again."""


class LandlordSettings(msgspec.Struct, frozen=True):
    """`swap_after_s`: how long a model that fits nowhere waits.  `itl_target_s`: the longest round of steps.

    `host_cache_bytes`: weights that may doze in the machine's memory.  `lends`: False gives every model on a device an
    equal part of its KV memory, for comparison.
    """

    swap_after_s: float = 10.0
    host_cache_bytes: float = NEVER
    itl_target_s: float | None = None
    lends: bool = True


class Placement:
    """Chooses devices for models, loads and unloads them.  `tell` takes the commands."""

    def __init__(
        self,
        settings: LandlordSettings,
        houses: Mapping[DeviceName, House],
        instances: Mapping[WorkerId, Instance],
        tell: Callable[[LandlordCommand], None],
    ) -> None:
        self._settings = settings
        self._houses = houses
        self._instances = instances
        self._tell = tell
        self._emptied_since: tuple[frozenset[WorkerId], float] | None = None

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
        target_s = self._settings.itl_target_s
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

    # ---- when

    def want(self, instance: Instance, now_s: float) -> None:
        """Load the instance's model if it is not loaded; unload the idle ones chosen to make room.

        While an operator unloads the model elsewhere it is not: its requests would only move here.
        """
        if instance.state is S.DRAINING and instance.drained_for is Why.FEWER:
            self.keep(instance, now_s)
        is_unwanted = any(one.drained_for is Why.OPERATOR for one in instance.model.instances)
        if is_unwanted or instance.state not in ABSENT:
            return
        choice = instance.model.choice
        if choice is not None and choice.instance is instance:
            for victim in choice.victims:
                is_idle = victim.state is S.READY and not victim.requests
                if is_idle and self.may_leave(victim, now_s):  # the twin of a pinned one may have left since
                    self.leave(victim, Why.EVICTED, now_s)
        instance.become(Intent.IN_SERVICE, now_s)

    def drain(self, instance: Instance, why: Why, now_s: float) -> None:
        """Drain the instance: its requests end or move, then it leaves."""
        instance.drained_for = why
        self._tell(events.DrainInstance(instance.id, why))
        instance.become(Intent.DRAINING, now_s)
        if not instance.requests:
            self.leave(instance, why, now_s)

    def keep(self, instance: Instance, now_s: float) -> None:
        """Let the instance stay after all."""
        instance.become(Intent.IN_SERVICE, now_s)
        instance.drained_for = None
        self._tell(events.ReopenInstance(instance.id, Why.WANTED))

    def leave(self, instance: Instance, why: Why, now_s: float) -> None:
        """Let the empty instance doze if that pays and there is room for it, else end it."""
        if instance.drained_for is None and instance.state is S.READY:
            self.drain(instance, why, now_s)
            return
        dozing = [one for one in self._instances.values() if one.state in (S.DOZING, S.LEAVING) and one is not instance]
        cached_bytes = sum(one.model.resident_bytes for one in dozing) + instance.model.resident_bytes
        dozes = instance.model.dozes and instance.state is not S.DOZING and why not in ENDING
        if dozes and cached_bytes <= self._settings.host_cache_bytes:
            instance.become(Intent.OUT, now_s, Event.DOZE)
            self._tell(events.DozeModel(instance.id, why))
        else:
            instance.become(Intent.OUT, now_s, Event.STOP)
            self._tell(events.UnloadModel(instance.id, why))

    def end_a_dozing(self, house: House, now_s: float) -> None:
        """End the longest dozing instance on the device, unless one is already leaving."""
        dozing = [one for one in house.instances if one.state is S.DOZING and house.ledger.resident(one.id)]
        if dozing and not any(one.state is S.LEAVING for one in house.instances):
            self.leave(min(dozing, key=lambda one: (one.since_s, one.id)), Why.EVICTED, now_s)

    def swap(self, model: DeclaredModel, now_s: float) -> None:
        """Unload the instance with the least work for a model that fits nowhere."""
        pair = self.swap_victim(model, now_s)
        if pair is not None:
            victim, heir = pair
            self.drain(victim, Why.SWAPPED, now_s)
            self.want(heir, now_s)

    def make_room(self, model: DeclaredModel, now_s: float) -> None:
        """Unload the least recently used model next to one that is short of memory, for KV or for weights.

        Where no request lacks room, those that wait are calls for which a front end is being made.
        """
        for one in model.instances:
            leaves = any(other.state is S.LEAVING for other in one.house.instances)  # whose memory may be enough
            has_room = not model.first_bytes and one.offered is not None and one.offered[0] > 0
            short = not leaves if one.state is S.CLEARING else one.state is S.READY and not has_room
            others = (other for other in self.idle(one.house, now_s) if other.model is not model)
            victim = next(others, None) if short else None
            if victim is not None:
                self.leave(victim, Why.EVICTED, now_s)
                return

    def pass_time(self, instance: Instance, now_s: float) -> None:
        """Unload the instance if it was idle for long enough; retry one that failed."""
        declared = instance.model.declared
        passed_s = now_s - instance.since_s
        if instance.state is S.FAILED and now_s >= instance.retry_at_s:
            instance.gone(now_s)
        elif instance.state is S.DOZING and passed_s >= declared.stop_after_s:
            self.leave(instance, Why.IDLE, now_s)
        idle = instance.state is S.READY and not instance.requests and not declared.pinned
        if idle and now_s - instance.idle_since_s >= declared.keep_alive_s:
            self.leave(instance, Why.IDLE, now_s)
        if instance.state in ABSENT and instance.requests:  # they came while it left, or before its load failed
            self.want(instance, now_s)

    def use_fewer(self, now_s: float, is_short: bool) -> None:
        """Empty the least used device, once that has been possible for long enough to outweigh reloading.

        `is_short`: requests of some model wait, so that no device is to be given up.
        """
        plan = None if is_short else self.emptied(now_s)
        if not plan:
            self._emptied_since = None
            return
        leaving = frozenset(one.id for one, _ in plan)
        if self._emptied_since is None or not leaving <= self._emptied_since[0]:
            self._emptied_since = leaving, now_s
        heirs = [(one, heir) for one, heir in plan if heir is not None]  # the others have been idle for long enough
        price_s = sum(one.return_s + (heir.start_s if heir.state in ABSENT else 0.0) for one, heir in heirs)
        if now_s - self._emptied_since[1] < EARNED_TIMES * price_s:
            return
        for leaver, heir in plan:
            if heir is None or heir.state is S.READY:
                self.drain(leaver, Why.FEWER, now_s)
            elif heir.state in ABSENT:
                self.want(heir, now_s)
