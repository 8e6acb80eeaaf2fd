"""One served model: its workers, the scheduler that places its requests on them, and its front end.

Owns whether the model can be asked, and why not.  Knows no other model: what they share, devices and the template
process, is the daemon's.
"""

from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from melld.config import Config
from melld.control.status import SERVING, ModelState, ModelStatus, WorkerState
from melld.daemon.history import History
from melld.daemon.why import Why
from melld.decisions.file import DecisionLogFile
from melld.decisions.stories import Stories
from melld.driver.boundaries import BoundaryKeeper
from melld.driver.drain import DrainState
from melld.driver.driver import Driver
from melld.driver.idle import IdleWorkers
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import WARM, Place
from melld.engine.fleet.supervisor import WorkerStartFailed
from melld.engine.fleet.template import TemplateProcess
from melld.engine.vllm_options import option_behind

NOT_LOADED = frozenset({WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.DRAINED})


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one model.  `config`: what it would be served with by itself."""

    config: Config
    fleet: Fleet
    driver: Driver
    idle: IdleWorkers
    boundaries: BoundaryKeeper
    history: History
    stories: Stories
    why: Why
    decisions: DecisionLogFile | None = None


class ServedModel:
    """A model in service, or on its way there.  `name`: the first of its names."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self.names = parts.config.model.names
        self.name = self.names[0]
        self.failure = ""
        """Why the model cannot be served until the daemon starts again; empty if it can."""
        self.frontend: Any = None
        """`Frontend`, once the first worker has been ready."""
        self.serving: Any = None
        """vLLM's serving classes (`init_app_state`), likewise."""

    async def start(self, on_ready: Callable[[Place], None]) -> None:
        """Start the workers; return when one is ready and each other is, or has failed once.

        Raises:
            WorkerStartFailed: none can be started; the error names the option to look at.
        """
        try:
            await self.parts.fleet.supervisor.start(on_ready)
        except WorkerStartFailed as failed:
            raise failed.because_of(option_behind(failed.reason, self.parts.config.model.vllm)) from failed

    async def open(self, template: TemplateProcess, prepared: tuple[Any, Namespace]) -> None:
        """Make the front end, of vLLM's configuration and serving arguments.  A worker has been ready."""
        from melld.engine.frontend.frontend import make_frontend, serving_state

        vllm_config, arguments = prepared
        budget_s = self.parts.config.server.constraint_cpu_s
        self.frontend = make_frontend(self.parts.fleet, template, vllm_config, budget_s)
        self.serving = await serving_state(self.frontend, arguments)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs as long as the model is served, by name."""
        parts = self.parts
        return {
            "outputs": self.frontend.watch_outputs(),
            "failures": self.frontend.fail_requests(),
            "token texts": self.frontend.learn_token_texts(),
            "hung workers": parts.fleet.supervisor.watch(),
            "epochs": parts.driver.run(),
            "idle workers": parts.idle.run(),
            "boundaries": parts.boundaries.run(),
        }

    def check_queue(self, client: str, priority: int) -> None:
        """Refuse a request that the full queue would send away at once.

        Raises:
            QueueFull
        """
        self.parts.driver.check_queue(client, priority)

    async def close(self) -> None:
        """End the drains, the workers, and what checks constraints."""
        if self.frontend is not None:
            await self.frontend.judges.close()
        await self.parts.driver.drains.close()
        await self.parts.fleet.supervisor.stop()

    def state_of(self, place: Place) -> tuple[WorkerState, str]:
        """Return a worker's state as operators see it, and the reason for it."""
        drain = self.parts.driver.drains.by_worker.get(place.slot.worker)
        if drain is not None:
            return (WorkerState.DRAINED if drain.state is DrainState.DRAINED else WorkerState.DRAINING), drain.stuck
        if place.state is WorkerState.FAILED and not place.given_up:
            return place.state, f"{place.detail}; starts again in {place.back_off_s:.0f} s"
        return place.state, place.detail

    def why_not_ready(self) -> str | None:
        """Say in a few words why a request would not be served now; return None if it would."""
        return self._why_not(lambda _place, state: state in SERVING)

    def why_closed(self) -> str | None:
        """Say why requests may not even wait: no worker will be restarted; return None if they may."""
        return self._why_not(
            lambda place, state: state not in (WorkerState.DRAINING, WorkerState.DRAINED) and not place.given_up
        )

    def _why_not(self, holds: Callable[[Place, WorkerState], bool]) -> str | None:
        if self.failure:
            return self.failure
        states = [(place, self.state_of(place)[0]) for place in self.parts.fleet.places.values()]
        if any(holds(place, state) for place, state in states):
            return None
        return "no worker can serve: " + ", ".join(f"{place.slot.worker} {state}" for place, state in states)

    def status(self) -> ModelStatus:
        """Return what clients and operators may know of the model as a whole."""
        states = [place.state for place in self.parts.fleet.places.values()]
        if any(state in WARM for state in states):
            state = ModelState.LOADED
        elif (reason := self.why_not_ready()) is not None:
            return ModelStatus(model=self.name, names=self.names, state=ModelState.FAILED, reason=reason)
        else:
            state = ModelState.UNLOADED if all(one in NOT_LOADED for one in states) else ModelState.LOADING
        return ModelStatus(model=self.name, names=self.names, state=state)
