"""One served model: its workers, the scheduler that places its requests on them, and its front end.

Owns whether the model can be asked, and why not.  Knows no other model: what they share, devices and the template
process, is the daemon's.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from melld.config import Config
from melld.control.status import SERVING, ModelState, ModelStatus, WorkerState
from melld.daemon.history import History
from melld.daemon.why import Explainer
from melld.decisions.file import DecisionLogFile
from melld.decisions.stories import Stories
from melld.driver.driver import Driver
from melld.driver.idle import IdleWorkers
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.life import WARM
from melld.engine.fleet.owner import WorkerStartFailed
from melld.engine.fleet.place import Place
from melld.engine.frontend.judges import Judges
from melld.engine.host.template import TemplateProcess
from melld.engine.model_files import answer_formats
from melld.engine.vllm_options import option_behind
from melld.errors import MelldError
from melld.ids import ModelName
from melld.scheduler.view import ClusterView
from melld.tasks import Work, vital

if TYPE_CHECKING:
    from melld.engine.frontend.prepared import Prepared

LOADING = frozenset({WorkerState.STARTING, WorkerState.WAKING})
TEXTS_AFTER_S = 1.0
"""How long after its first load a model's token texts are learned: the calls that wait for it go first."""


class ModelNotLoaded(MelldError):
    """The call's model is not loaded: it could not be, or not in time."""

    status = 503
    code = "model_not_loaded"

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class NotUnloaded(MelldError):
    """The model cannot be unloaded now."""

    status = 409
    code = "not_unloaded"


class Unloaded(MelldError):
    """An operator has unloaded the request's model at once."""

    status = 503
    code = "model_unloaded"

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} was unloaded by an operator: try again later")


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one model.  `config`: what it would be served with by itself."""

    config: Config
    fleet: Fleet
    driver: Driver
    cluster: ClusterView
    idle: IdleWorkers
    history: History
    stories: Stories
    why: Explainer
    decisions: DecisionLogFile | None = None


class ServedModel:
    """A model in service, or about to be.  `name`: the first of its names.

    `on_wanted` has it loaded; a lone model is loaded at the start.
    """

    def __init__(
        self, parts: ModelParts, on_wanted: "Callable[[ServedModel], None]" = lambda _: None, key: str = ""
    ) -> None:
        """`key`: distinguishes it from a removed model of the same name that is still finishing."""
        self.parts = parts
        self.names = parts.config.model.names
        self.name = self.names[0]
        self.key = ModelName(key or self.name)
        self.failure = ""
        """Why its last load failed; empty if it did not."""
        self.waiting: set[asyncio.Future[None]] = set()
        """Calls that wait for its load."""
        self.calls = self.first_calls = 0
        """Calls that have not ended, and those of them that came before its first load."""
        self._on_wanted = on_wanted
        self._closed_until_s = 0.0
        self.frontend: Any = None
        """`Frontend`, once it is connected to a worker that has been ready."""
        self._capabilities: tuple[str, ...] = ()
        self.serving: Any = None
        """vLLM's serving classes (`init_app_state`), from then on too."""

    async def start(self, on_ready: Callable[[Place], None]) -> None:
        """Start the workers; return when one is ready and every other is ready or has failed once.

        Raises:
            WorkerStartFailed: none can be started; the error names the option to look at.
        """
        try:
            await self.parts.fleet.supervisor.start(on_ready)
        except WorkerStartFailed as failed:
            raise self.named(failed) from failed

    def named(self, failed: WorkerStartFailed) -> WorkerStartFailed:
        """Return the failure, naming the option to blame if there is one."""
        return failed.because_of(option_behind(failed.reason, self.parts.config.model.vllm))

    def connect(self, template: TemplateProcess, prepared: "Prepared") -> None:
        """Serve by a front end that has been fitted to the workers."""
        from melld.engine.frontend.prepared import capabilities_of

        spec = next(iter(self.parts.fleet.places.values())).slot.spec
        judges = Judges(template, spec, self.parts.config.server.constraint_cpu_s)
        prepared.frontend.connect(self.parts.fleet, prepared.tasks, judges)
        self.frontend, self.serving = prepared.frontend, prepared.serving
        self._capabilities = capabilities_of(prepared)

    def loaded(self) -> None:
        """Wake the calls that wait for the model."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    def failed(self, why: str, retry_s: float) -> None:
        """Note that the model could not be loaded and will not be retried for `retry_s`; refuse the calls that wait."""
        self.failure = f"could not be loaded: {why}"
        told = f"{self.name} {self.failure}"
        self._closed_until_s = asyncio.get_running_loop().time() + retry_s
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_exception(ModelNotLoaded(told, retry_s))
        for live in list(self.parts.fleet.live.values()):
            if live.worker is None and not live.output_token_ids:
                self.parts.fleet.requests.end(live.request, ModelNotLoaded(told, retry_s))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of its adapters."""
        return tuple(one.name for one in self.parts.config.model.lora)

    @property
    def is_warm(self) -> bool:
        """Return True if a worker has the model loaded."""
        return any(place.is_ready for place in self.parts.fleet.places.values())

    @property
    def has_been_warm(self) -> bool:
        """Return True if a worker ever loaded the model: it can be served, now or once a worker is back."""
        return self.parts.fleet.last_ready is not None

    @property
    def moves(self) -> str:
        """Return how its requests move, according to its latest worker; empty before the first."""
        return ready.moves if (ready := self.parts.fleet.last_ready) else ""

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Count a call: before the model's first load nothing else knows of it until it is a request."""
        is_first = self.serving is None
        self.calls += 1
        self.first_calls += is_first
        try:
            yield
        finally:
            self.calls -= 1
            self.first_calls -= is_first

    async def until_loaded(self) -> None:
        """Have the model loaded; return once it can serve.

        Raises:
            ModelNotLoaded: it cannot be loaded, or not within the queue's deadline.
        """
        if self.serving is not None and self.is_warm:
            return
        deadline_s = self.parts.config.server.queue_deadline_s
        waiter = asyncio.get_running_loop().create_future()
        self.waiting.add(waiter)
        try:
            self._on_wanted(self)
            async with asyncio.timeout(deadline_s):
                await waiter
        except TimeoutError:
            why = f"{self.name} could not be loaded within {deadline_s:g} s: no room"
            raise ModelNotLoaded(why, 1.0) from None
        finally:
            self.waiting.discard(waiter)

    def work(self) -> dict[str, Work]:
        """Return the tasks that run as long as the model is served, by name."""
        parts = self.parts
        return {
            "outputs": vital(self.frontend.watch_outputs),
            "failures": Work(self.frontend.fail_requests),
            "token texts": Work(self._learn_token_texts),
            "epochs": vital(parts.driver.run),
            "idle workers": Work(parts.idle.run),
        }

    async def _learn_token_texts(self) -> None:
        await asyncio.sleep(TEXTS_AFTER_S)
        await self.frontend.learn_token_texts()

    def check_queue(self, client: str, priority: int) -> None:
        """Refuse a request that the full queue would send away at once.

        Raises:
            QueueFull
        """
        self.parts.driver.check_queue(client, priority)

    async def close(self) -> None:
        """End the drains, the workers, and what checks constraints."""
        if self.frontend is not None:
            self.frontend.engine_core.resources.engine_dead = True  # for what a response in the background asks yet
            await self.frontend.judges.close()
        await self.parts.driver.drains.close()
        await self.parts.fleet.supervisor.stop()

    def state_of(self, place: Place) -> tuple[WorkerState, str]:
        """Return a worker's state as operators see it, and the reason for it."""
        drain = self.parts.driver.drains.by_worker.get(place.slot.worker)
        if drain is not None:
            gone = WorkerState.DRAINED if drain.loan is None else WorkerState.LENT
            return (gone if drain.is_over else WorkerState.DRAINING), drain.stuck
        if place.state is WorkerState.WAITING:
            return place.state, place.life.obstacle
        if place.state is WorkerState.FAILED and not place.life.given_up:
            due_s = place.rested_s if place.timer is None else place.timer.when()
            left_s = math.ceil(max(0.0, due_s - time.monotonic()))
            when = "restarts in" if self.parts.fleet.supervisor.owner.wants_all else "will not be retried for"
            return place.state, f"{place.detail}; {when} {left_s} s" if left_s else place.detail
        return place.state, place.detail

    def why_not_ready(self) -> str | None:
        """Say in a few words why a request would not be served now; return None if it would."""
        return self._why_not(lambda _place, state: state in SERVING)

    def why_closed(self) -> str | None:
        """Say why requests may not even wait: no worker will be restarted; return None if they may."""
        drains, places = self.parts.driver.drains.by_worker, self.parts.fleet.places.values()
        if not self.failure and any(one.life.state in WARM and one.slot.worker not in drains for one in places):
            return None  # the usual case first: each call asks
        is_lent, out = self.parts.driver.loans.status_of, (WorkerState.DRAINING, WorkerState.DRAINED)
        return self._why_not(
            lambda place, state: bool(is_lent(place.slot.worker)) or (state not in out and not place.life.given_up)
        )

    def _why_not(self, holds: Callable[[Place, WorkerState], bool]) -> str | None:
        if self.failure and asyncio.get_running_loop().time() < self._closed_until_s:
            return f"{self.name} {self.failure}"
        states = ((place, *self.state_of(place)) for place in self.parts.fleet.places.values())
        told = []
        for place, state, reason in states:
            if holds(place, state):  # mostly the first: each call asks
                return None
            told.append(f"{place.slot.worker} {state}" + f" ({reason})" * (state is WorkerState.WAITING))
        return f"no worker can serve: {', '.join(told)}"

    def status(self) -> ModelStatus:
        """Return what clients and operators may know of the model as a whole."""
        state, reason = ModelState.UNLOADED, ""
        if self.is_warm:
            state = ModelState.LOADED
        elif LOADING.intersection(place.state for place in self.parts.fleet.places.values()):
            state = ModelState.LOADING
        elif reason := self.failure or self.why_not_ready() or "":
            state = ModelState.FAILED
        return ModelStatus(
            model=self.name,
            names=self.names,
            state=state,
            reason=reason,
            capabilities=self._capabilities,
            answer_formats=str(answer_formats(self.parts.config.model)),
        )
