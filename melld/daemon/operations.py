"""The operations that an operator can ask of a running daemon over its control socket.

Owns which part answers which message.  Does nothing itself.
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from melld.control.messages import (
    AlreadyThere,
    AskStory,
    Drain,
    Drained,
    Lend,
    Load,
    Migrate,
    Resume,
    Resumed,
    Unload,
)
from melld.control.server import Lasting, OpenCall, Operation
from melld.control.status import ModelStatus
from melld.daemon.machines import Machines
from melld.daemon.model import ModelNotLoaded, ModelParts, NotUnloaded, ServedModel
from melld.daemon.town.landlord import LandlordShell
from melld.decisions.stories import Story
from melld.driver.drain import Drains
from melld.driver.lendable import NeverLent
from melld.driver.report import MoveReport
from melld.errors import UnknownModel, UnknownRequest, UnknownWorker
from melld.ids import RequestId, WorkerId

if TYPE_CHECKING:
    from melld.daemon.lifecycle import Daemon


def _of_worker(models: Sequence[ServedModel], worker: str, others: Sequence[str] = ()) -> ModelParts:
    """Return the parts of the worker's model.  `others`: other valid names, for the error.

    Raises:
        UnknownWorker: no worker has that name.
    """
    for model in models:
        if worker in model.parts.fleet.places:
            return model.parts
    known = [place for model in models for place in model.parts.fleet.places]
    raise UnknownWorker(worker, [*known, *others])


def model_called(models: Sequence[ServedModel], name: str) -> ServedModel:
    """Return the model of that name; the first for an empty name.

    Raises:
        UnknownModel: no model has that name.
    """
    for model in models:
        if not name or name in model.names:
            return model
    raise UnknownModel(name, [known for model in models for known in model.names])


def operations_of(
    models: Sequence[ServedModel],
    landlord: LandlordShell,
    machines: Machines,
    daemon: "Daemon",
) -> dict[str, Operation | Lasting]:
    """Return the operations behind `melld migrate`, `drain`, `resume`, `run`, `load`, `unload` and `why`."""

    async def lend(asked: Lend, call: OpenCall) -> None:
        if machines.names:
            raise NeverLent("Ray allocates a cluster's devices: `melld drain` a machine, then request them from Ray")
        if (reason := landlord.division.why_none_is_empty) is not None:
            raise NeverLent(reason)
        await models[0].parts.driver.loans.lend(asked, call)

    return {**_of_workers(models, machines), **_of_models(models, landlord, daemon), "lend": Lasting(Lend, lend)}


def _of_workers(models: Sequence[ServedModel], machines: Machines) -> dict[str, Operation]:
    async def migrate(asked: Migrate) -> MoveReport | AlreadyThere:
        driver = _of_worker(models, asked.worker).driver
        way = asked.via, asked.after_first_token
        return await driver.migrate(RequestId(asked.request), WorkerId(asked.worker), *way)

    def workers_of(name: str) -> tuple[Drains, list[WorkerId]]:
        """Return the workers of that machine, or the one of that name, and their model's drains."""
        workers = machines.workers(name) or [WorkerId(name)]
        return _of_worker(models, workers[0], machines.names).driver.drains, workers

    async def drain(asked: Drain) -> Drained:
        drains, workers = workers_of(asked.worker)
        return Drained.of_all(asked.worker, await drains.drain_all(workers, asked.wait, asked.deadline_s))

    async def resume(asked: Resume) -> Resumed:
        drains, workers = workers_of(asked.worker)
        resumed = [await drains.resume(worker) for worker in workers]
        is_any = any(one.was_drained for one in resumed), any(one.started for one in resumed)
        return Resumed(worker=asked.worker, was_drained=is_any[0], started=is_any[1])

    return {
        "migrate": Operation(Migrate, migrate),
        "drain": Operation(Drain, drain),
        "resume": Operation(Resume, resume),
    }


def _of_models(models: Sequence[ServedModel], landlord: LandlordShell, daemon: "Daemon") -> dict[str, Operation]:
    async def why(asked: AskStory) -> Story:
        for model in models[:-1]:
            with contextlib.suppress(UnknownRequest):
                return model.parts.stories.story(asked.request)
        return models[-1].parts.stories.story(asked.request)

    async def load(asked: Load) -> ModelStatus:
        model = await daemon.load(asked.path, asked.model) if asked.path else model_called(models, asked.model)
        if not landlord.tenants and model.serving is not None and not model.is_warm:
            raise ModelNotLoaded(f"{model.name} is the only model: its next request starts a worker", 1.0)
        await model.until_loaded()
        return model.status()

    async def unload(asked: Unload) -> ModelStatus:
        model = model_called(models, asked.model)
        if not landlord.tenants:
            raise NotUnloaded("the only model cannot be unloaded: to free memory, stop the daemon or drain workers")
        if not await daemon.unload(model, asked.now):
            await landlord.unload(model, asked.now)
        return model.status()

    return {
        "load": Operation(Load, load),
        "unload": Operation(Unload, unload),
        "why": Operation(AskStory, why),
    }
