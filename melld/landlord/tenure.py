"""Decides each step of an instance's life.

Owns when: `housing` says where to.  Running requests are never cut: an instance drains first.
"""

from collections.abc import Callable, Mapping

import msgspec

from melld.ids import WorkerId
from melld.landlord import events
from melld.landlord.events import NEVER, AnyLandlordCommand, Why
from melld.landlord.housing import Housing
from melld.landlord.instance import ABSENT, DeclaredModel, House, Instance
from melld.landlord.instance import InstanceState as S

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


class Tenure:
    """Loads and unloads instances.  `tell` takes the commands."""

    def __init__(
        self,
        settings: LandlordSettings,
        housing: Housing,
        instances: Mapping[WorkerId, Instance],
        tell: Callable[[AnyLandlordCommand], None],
    ) -> None:
        self._settings = settings
        self._housing = housing
        self._instances = instances
        self._tell = tell
        self._emptied_since: tuple[frozenset[WorkerId], float] | None = None

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
                if is_idle and self._housing.may_leave(victim, now_s):  # the twin of a pinned one may have left since
                    self.leave(victim, Why.EVICTED, now_s)
        instance.become("want", now_s)

    def drain(self, instance: Instance, why: Why, now_s: float) -> None:
        """Drain the instance: its requests end or move, then it leaves."""
        instance.drained_for = why
        self._tell(events.DrainInstance(instance.id, why))
        instance.become("drain", now_s)
        if not instance.requests:
            self.leave(instance, why, now_s)

    def keep(self, instance: Instance, now_s: float) -> None:
        """Let the instance stay after all."""
        instance.become("keep", now_s)
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
        instance.become("leave", now_s)
        if dozes and cached_bytes <= self._settings.host_cache_bytes:
            self._tell(events.DozeModel(instance.id, why))
        else:
            self._tell(events.UnloadModel(instance.id, why))

    def end_a_dozing(self, house: House, now_s: float) -> None:
        """End the longest dozing instance on the device, unless one is already leaving."""
        dozing = [one for one in house.instances if one.state is S.DOZING and house.ledger.resident(one.id)]
        if dozing and not any(one.state is S.LEAVING for one in house.instances):
            self.leave(min(dozing, key=lambda one: (one.since_s, one.id)), Why.EVICTED, now_s)

    def swap(self, model: DeclaredModel, now_s: float) -> None:
        """Unload the instance with the least work for a model that fits nowhere."""
        pair = self._housing.swap_victim(model, now_s)
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
            others = (other for other in self._housing.idle(one.house, now_s) if other.model is not model)
            victim = next(others, None) if short else None
            if victim is not None:
                self.leave(victim, Why.EVICTED, now_s)
                return

    def pass_time(self, instance: Instance, now_s: float) -> None:
        """Unload the instance if it was idle for long enough; retry one that failed."""
        declared = instance.model.declared
        passed_s = now_s - instance.since_s
        if instance.state is S.FAILED and now_s >= instance.retry_at_s:
            instance.become("recover", now_s)
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
        plan = None if is_short else self._housing.emptied(now_s)
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
