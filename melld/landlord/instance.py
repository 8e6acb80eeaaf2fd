"""Records of models and their instances.

An instance's life is that of its worker (`engine.fleet.life`), as the Landlord's commands will make it and workers
report it.  What the Landlord counts on is derived from that and from what it wants of the instance:

    wanted, without weights: CLEARING, as memory for them is being taken      ready, not wanted: DRAINING, until empty
"""

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple

from melld.engine.fleet.life import Event, Intent, State, Who, WorkerLife
from melld.errors import IllegalTransition
from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord.estimate import ModelDemand
from melld.landlord.events import ModelDeclared, Why
from melld.landlord.granules import GranuleLedger, usable_bytes

REMEMBERED_S = 10.0
"""Period over which use of KV memory is averaged when several instances are short of it."""


class InstanceState(enum.StrEnum):
    """State of an instance."""

    STOPPED = "stopped"
    CLEARING = "clearing"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    LEAVING = "leaving"
    DOZING = "dozing"
    FAILED = "failed"


S = InstanceState
STATES: Mapping[tuple[State, Intent], InstanceState] = {
    (State.STOPPED, Intent.OUT): S.STOPPED,
    (State.STOPPED, Intent.IN_SERVICE): S.CLEARING,
    (State.DOZING, Intent.OUT): S.DOZING,
    (State.DOZING, Intent.IN_SERVICE): S.CLEARING,
    (State.STARTING, Intent.IN_SERVICE): S.LOADING,
    (State.READY, Intent.IN_SERVICE): S.READY,
    (State.READY, Intent.DRAINING): S.DRAINING,
    (State.STOPPING, Intent.OUT): S.LEAVING,
    (State.FAILED, Intent.OUT): S.FAILED,
}
PRESENT = frozenset({S.CLEARING, S.LOADING, S.READY})
"""States of instances that serve or will: their floors are promised."""
ON_DEVICE = PRESENT | {S.DRAINING, S.LEAVING}
ABSENT = frozenset({S.STOPPED, S.DOZING})
UNLOADED = frozenset({S.STOPPED, S.FAILED})
"""States of instances that hold nothing."""


class DeclaredModel:
    """A model: what was declared, and where it would be loaded next.

    `waiting_since_s`: since when its requests find no room; None: none wait.  `first_bytes`: of the first of them.
    """

    def __init__(self, declared: ModelDeclared) -> None:
        self.declared = declared
        self.resident_bytes = declared.resident_bytes
        self.dozing_bytes = declared.dozing_bytes
        self.block_bytes = declared.block_bytes
        self.demand = ModelDemand()
        self.instances: list[Instance] = []
        self.waiting_since_s: float | None = None
        self.first_bytes = 0
        self.choice: Choice | None = None

    @property
    def name(self) -> ModelName:
        """Return its name."""
        return self.declared.model

    @property
    def dozes(self) -> bool:
        """Return True if it can doze, and would free at least half of what it holds."""
        return self.declared.dozes and 2 * self.dozing_bytes <= self.resident_bytes

    @property
    def most_bytes(self) -> int:
        """Return the most KV memory that it could ever have on one device; 0: it fits on none."""
        return max((one.most_bytes for one in self.instances), default=0)

    @property
    def is_served(self) -> bool:
        """Return True while an instance serves or will."""
        return any(one.state in PRESENT for one in self.instances)


class House:
    """A device: its ledger and all instances declared there."""

    def __init__(self, name: DeviceName, ledger: GranuleLedger) -> None:
        self.name = name
        self.ledger = ledger
        self.instances: list[Instance] = []

    @property
    def present(self) -> "list[Instance]":
        """Instances that serve here or will."""
        return [one for one in self.instances if one.state in PRESENT]

    @property
    def promised(self) -> int:
        """Granules for KV once all departures and arrivals are complete.

        What dozes counts as gone: it ends as soon as its memory is needed (`is_short`).
        """
        staying = sum(one.resident_bytes for one in self.present)
        return (self.ledger.memory_bytes - staying) // self.ledger.granule_bytes - 1

    def is_short(self, now_s: float) -> bool:
        """Return True if more memory is needed than dozing instances leave."""
        ledger = self.ledger
        lacking = [
            one.model.resident_bytes - ledger.resident(one.id) for one in self.instances if one.state is S.CLEARING
        ]
        claims = sum(one.claim(now_s) for one in self.instances)
        return claims - (-sum(lacking) // ledger.granule_bytes) > ledger.limit

    @property
    def is_awake(self) -> bool:
        """Return True while any weights are there or on their way."""
        return any(one.state in ON_DEVICE for one in self.instances)


class Instance:
    """A model's worker on one device.

    `used_bytes`, `ahead_bytes`, `requests`: as its scheduler counts.  `taking`: granules that it was asked for and has
    not answered.  `stuck_until_s`: until then it is asked for nothing.  `since_s`: of its present state.
    `took_s`: its last load.  `idle_since_s`: since when it has no request.  `drained_for`: why it drains.
    """

    def __init__(self, worker: WorkerId, model: DeclaredModel, house: House, now_s: float) -> None:
        self.id = worker
        self.model = model
        self.house = house
        self.gone(now_s)
        self.used_bytes = self.ahead_bytes = self.requests = self.taking = 0
        self.mean_bytes = self.took_s = 0.0
        self.noted_s = self.idle_since_s = now_s
        self.stuck_until_s = self.retry_at_s = -math.inf
        self.offered: tuple[int, float] | None = None
        self.drained_for: Why | None = None

    def become(self, intent: Intent, now_s: float, *events: Event) -> None:
        """Take its life through these events, and note what is wanted of it from now on.

        Raises:
            IllegalTransition: that contradicts what is known of it.
        """
        self._life.wish(Who.LANDLORD, intent)
        for event in events:
            self._life.take(event)
        if (after := STATES.get((self._life.state, intent))) is None:
            raise IllegalTransition("instance", self.id, self._life.state, intent.name)
        self.state, self.since_s = after, now_s

    def gone(self, now_s: float) -> None:
        """Note that it has no process."""
        self._life = WorkerLife(self.id)
        self.become(Intent.OUT, now_s)

    def note_use(self, used_bytes: int, ahead_bytes: int, requests: int, now_s: float) -> None:
        """Record what its scheduler counts now."""
        fresh = 1.0 - math.exp((self.noted_s - now_s) / REMEMBERED_S)
        self.mean_bytes += fresh * (self.used_bytes - self.mean_bytes)
        self.noted_s = now_s
        if self.requests and not requests:
            self.idle_since_s = now_s
        self.used_bytes, self.ahead_bytes, self.requests = used_bytes, ahead_bytes, requests

    @property
    def resident_bytes(self) -> int:
        """Bytes besides KV while it serves: measured there, else at its model's last load."""
        is_there = self.state in (S.LOADING, S.READY, S.DRAINING)
        return self.house.ledger.resident(self.id) if is_there else self.model.resident_bytes

    @property
    def start_s(self) -> float:
        """Time until it would serve if it were wanted now."""
        if self.state in (S.READY, S.DRAINING):
            return 0.0
        declared = self.model.declared
        return declared.wake_s if self.state is S.DOZING else declared.load_s

    @property
    def return_s(self) -> float:
        """Time until it would serve again if it left now."""
        declared = self.model.declared
        return declared.wake_s if self.model.dozes else self.took_s or declared.load_s

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of one granule that surely hold whole blocks of the model."""
        return usable_bytes(self.house.ledger.granule_bytes, max(self.model.block_bytes, 1))

    @property
    def granted(self) -> int:
        """Granules it may use and has not been asked to return."""
        return self.house.ledger.granted(self.id) - self.taking

    @property
    def need(self) -> int:
        """Granules for its requests and their growth; at least its floor while it is there."""
        needed = -(-(self.used_bytes + self.ahead_bytes) // self.usable_bytes)
        return max(needed, 1) if self.state in ON_DEVICE else needed

    def claim(self, now_s: float) -> int:
        """Return the granules that others cannot be promised: those it needs, and those it cannot return now."""
        return max(self.need, self.granted) if now_s < self.stuck_until_s else self.need

    @property
    def most_bytes(self) -> int:
        """Return the most KV memory it could ever have, next to pinned models with a floor each.  0: no room."""
        ledger, pinned = self.house.ledger, self._pinned
        resident_bytes = sum(one.resident_bytes for one in (self, *pinned))
        granules = (ledger.memory_bytes - resident_bytes) // ledger.granule_bytes - 1 - len(pinned)
        return max(granules, 0) * self.usable_bytes

    @property
    def why_too_large(self) -> str:
        """Say what leaves it no room."""
        resident, memory = _mib(self.resident_bytes), _mib(self.house.ledger.memory_bytes)
        beside = "".join(f", and {one.model.name}, pinned, {_mib(one.resident_bytes)}" for one in self._pinned)
        held = f"{self.id} takes {resident} of the {memory} that {self.house.name} may hold{beside}"
        return f"{held}, which leaves no room for KV memory"

    @property
    def _pinned(self) -> "list[Instance]":
        """Instances on its device that stay: each is all that serves a pinned model."""
        pinned = [one for one in self.house.present if one.model.declared.pinned and one.model is not self.model]
        return [one for one in pinned if sum(other.state in PRESENT for other in one.model.instances) == 1]

    @property
    def weights(self) -> int:
        """Granules that its weights displace."""
        return -(-self.resident_bytes // self.house.ledger.granule_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


class Choice(NamedTuple):
    """An instance to load, those that must leave for it, and the granules that it would have."""

    instance: Instance
    victims: tuple[Instance, ...]
    granules: int

    @property
    def dozers(self) -> list[Instance]:
        """Return the dozing instances there: they may be ended for it, too."""
        return [one for one in self.instance.house.instances if one.state is S.DOZING]
