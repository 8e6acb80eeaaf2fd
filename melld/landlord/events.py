"""The Landlord's input (events) and output (commands).

Events are facts, in the past tense; commands are decisions.  `landlord.Landlord.handle` takes one event and returns the
commands in the order in which they must be applied.  Sizes are bytes, or granules of one device; times are seconds.

An instance is a model's worker on one device, running or not.  It is named by a worker's id, and every pair is declared
once.  The caller tells the schedulers: `OfferCapacity` is a capacity and a wake time, `DrainInstance` and
`ReopenInstance` are a drain and a resume.
"""

import enum
import math

import msgspec

from melld.ids import DeviceName, ModelName, WorkerId
from melld.scheduler.events import Caused, Event

NEVER = math.inf


class Why(enum.StrEnum):
    """Reason of a decision, for the decision log and for people."""

    WANTED = "wanted"
    ROOM = "room"
    BIRTH = "birth"
    SHORT = "short of KV memory"
    WEIGHTS = "room for weights"
    EVICTED = "evicted for another model"
    SWAPPED = "swapped for another model"
    IDLE = "idle"
    FEWER = "fewer devices"
    TOO_LARGE = "larger than its device"
    BACK = "back"
    OPERATOR = "operator"


class LandlordEvent(Event, frozen=True, tag=True, gc=False):
    """A fact."""


class OfInstance(LandlordEvent, frozen=True, tag=True, gc=False):
    """A fact about one instance."""

    worker: WorkerId


class DeviceDeclared(LandlordEvent, frozen=True, tag=True, gc=False):
    """A device with an arena.  `memory_bytes`: for weights and KV together, less what is reserved for anything else."""

    device: DeviceName
    memory_bytes: int
    granule_bytes: int


class ModelDeclared(LandlordEvent, frozen=True, tag=True, gc=False):
    """A model that may be loaded; for a known one, new settings, while measured sizes stay.

    `resident_bytes`: weights and all else that a worker holds beside KV; corrected by each load,
    as `block_bytes` is.  `load_s`, `wake_s`:
    from nothing, and from dozing, to serving.  `weight`: its share when memory is short.  `dozes`: it can.
    `dozing_bytes`: what a worker keeps while it dozes; corrected each time that one does.
    `keep_alive_s`: idle time until it dozes; `stop_after_s`: dozing time until it stops.
    """

    model: ModelName
    resident_bytes: int
    block_bytes: int
    load_s: float
    wake_s: float = 0.0
    weight: float = 1.0
    pinned: bool = False
    dozes: bool = True
    dozing_bytes: int = 0
    keep_alive_s: float = 300.0
    stop_after_s: float = NEVER


class InstanceDeclared(OfInstance, frozen=True, tag=True, gc=False):
    """The model may be loaded on the device, as this worker."""

    model: ModelName
    device: DeviceName


class ModelRemoved(LandlordEvent, frozen=True, tag=True, gc=False):
    """The model, none of whose instances has a process, must not be loaded any more."""

    model: ModelName


class ModelWanted(OfInstance, frozen=True, tag=True, gc=False):
    """A call, a pin or an operator needs the model loaded as this instance."""


class WorkerActivated(OfInstance, frozen=True, tag=True, gc=False):
    """The model's scheduler has put this instance in service: placed requests are reported by `KvNeeded`."""


class UnloadAsked(OfInstance, frozen=True, tag=True, gc=False):
    """An operator asked to unload the instance once its requests have finished."""


class KvNeeded(OfInstance, frozen=True, tag=True, gc=False):
    """The KV memory the model's scheduler now counts on the instance; sent after each decision and in each epoch.

    `ahead_bytes`: growth within one horizon.
    """

    used_bytes: int
    ahead_bytes: int
    requests: int


class KvReturned(OfInstance, frozen=True, tag=True, gc=False):
    """The answer to `TakeKv`: these granules are empty and zeroed.

    Fewer than asked, none included, is an answer, as after its deadline.  What is returned later still counts.
    """

    granules: tuple[int, ...]


class ModelLoaded(OfInstance, frozen=True, tag=True, gc=False):
    """The instance serves.  `resident_bytes`, `block_bytes`: measured; 0: as declared.

    One whose blocks are larger than an eighth of a granule has KV memory of its own, which counts as resident.
    """

    resident_bytes: int = 0
    block_bytes: int = 0


class LoadFailed(OfInstance, frozen=True, tag=True, gc=False):
    """The instance failed to load, holds no memory, and is not retried for `retry_s`."""

    retry_s: float


class ModelDozed(OfInstance, frozen=True, tag=True, gc=False):
    """The instance's process has released its weights; its granules are free and zero.

    `resident_bytes`: what it still holds on the device.
    """

    resident_bytes: int = 0


class ModelGone(OfInstance, frozen=True, tag=True, gc=False):
    """The instance's process exited, requested or not; its granules are free and zero, and no copy reads them."""


class ModelLoad(msgspec.Struct, gc=False):
    """Work of one model since the last report.

    `ended` requests got `output_tokens` and held `held_bytes` each at their end (a sum over them); `prefill_s` is what
    `prompts` took alone; `step_s` a step of its decodes alone, 0 if there was none.  `waiting` requests have no place
    now; the first of them holds `first_bytes`.
    """

    arrivals: int = 0
    ended: int = 0
    output_tokens: int = 0
    held_bytes: int = 0
    prompts: int = 0
    prefill_s: float = 0.0
    step_s: float = 0.0
    waiting: int = 0
    first_bytes: int = 0


class ModelsMeasured(LandlordEvent, frozen=True, tag=True):
    """Activity of each model in the last epoch; missing ones did nothing."""

    loads: dict[ModelName, ModelLoad]


class LandlordCommand(Caused, frozen=True, tag=True, gc=False):
    """A decision about one instance."""

    worker: WorkerId
    why: Why


class OfferCapacity(LandlordCommand, frozen=True, tag=True, gc=False):
    """Tell the model's scheduler the instance's capacity and how soon it could serve.

    A newer offer replaces one that was not yet told: schedulers that were told first have decided since.
    """

    capacity_bytes: int
    wake_s: float


class GrantKv(LandlordCommand, frozen=True, tag=True, gc=False):
    """Let the instance use these granules; all their bytes are zero."""

    granules: tuple[int, ...]


class TakeKv(LandlordCommand, frozen=True, tag=True, gc=False):
    """Take this many granules, chosen by the instance.  Answered by `KvReturned`."""

    granules: int
    deadline_s: float


class LoadModel(LandlordCommand, frozen=True, tag=True, gc=False):
    """Load the instance's model, or wake it.  Answered by `ModelLoaded`, `LoadFailed` or `ModelGone`."""


class DrainInstance(LandlordCommand, frozen=True, tag=True, gc=False):
    """Place no more requests on the instance; running ones end there or move."""


class ReopenInstance(LandlordCommand, frozen=True, tag=True, gc=False):
    """Let the scheduler use the instance again, loaded or not, within its capacity."""


class DozeModel(LandlordCommand, frozen=True, tag=True, gc=False):
    """Have the instance's process release its weights and wait.  Answered by `ModelDozed` or `ModelGone`."""


class StopDozing(LandlordCommand, frozen=True, tag=True, gc=False):
    """Interrupt an instance's going to doze, so that it wakes sooner.  `ModelDozed` follows all the same."""


class UnloadModel(LandlordCommand, frozen=True, tag=True, gc=False):
    """End the instance's process.  Answered by `ModelGone`."""
