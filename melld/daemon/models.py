"""The models of a daemon, which come and go while it runs.

Owns the list that calls, status and metrics go by, and each model's front end and tasks.  What vLLM refuses in a new
configuration changes nothing.

    prepare: what is new is let in, and loads while vLLM ──► carry_out: it can be called, is pinned, has its log;
             tries the rest of its settings; refused, it leaves          what is gone leaves when its calls have ended
"""

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import prometheus_client

from melld.config import Config, ModelConfig, kept_of
from melld.control.messages import Reloaded
from melld.daemon import preflight
from melld.daemon.devices import kind_of
from melld.daemon.model import ServedModel, Unloaded
from melld.daemon.sizes import fitted
from melld.daemon.watch import Condition
from melld.daemon.wiring import DaemonParts, make_candidate
from melld.errors import ConfigError
from melld.tasks import Tasks, Work

if TYPE_CHECKING:
    from melld.engine.frontend.prepared import Prepared

log = logging.getLogger("melld.models")


class Models:
    """The models of one daemon."""

    def __init__(self, parts: DaemonParts, condition: Condition, tasks: Tasks) -> None:
        self.served = parts.models
        self._parts = parts
        self._condition, self._tasks = condition, tasks
        self._by_hand: dict[str, ModelConfig] = {}
        self._numbers = itertools.count(len(self.served))
        self._leaving: dict[ServedModel, asyncio.Task[None]] = {}
        self._opening: dict[ServedModel, asyncio.Task[None]] = {}
        self._candidates: dict[str, ServedModel] = {}
        """Models being loaded that nobody can call yet, by name."""
        self._vllm_metrics: Any = None
        self._can_change = asyncio.Event()
        self._alone = parts.models[0] if len(parts.models) == 1 else None
        """The only model that there was at the start, whose tasks bear no name."""
        self.prepared: dict[ServedModel, Prepared] = {}
        """Of each model; filled at the start."""

    # -- one model's life -------------------------------------------------------------------------------------------

    def watch(self, model: ServedModel) -> None:
        """Begin to look for hung workers of the model."""
        self._tasks.keep(self._name_of("hung workers", model), Work(model.parts.fleet.supervisor.watch))

    async def serve(self) -> None:
        """Make the front ends of all loaded models, and of each other one once it is loaded."""
        from melld.engine.frontend.prepared import leave_to_collect
        from melld.engine.frontend.vllm_metrics import VllmMetrics

        self._vllm_metrics = VllmMetrics(prometheus_client.REGISTRY, lambda: self.served[0].key)
        for model in self.served:
            if model.has_been_warm:
                await self.open(model)
        if not self.is_alone:
            self._begin_landlord()
        prometheus_client.REGISTRY.register(self._vllm_metrics)
        leave_to_collect()
        self._can_change.set()

    def _begin_landlord(self) -> None:
        self._parts.landlord.serve(self.loaded)
        self._tasks.keep("landlord", Work(self._parts.landlord.run))

    def loaded(self, model: ServedModel) -> None:
        """Wake the calls that wait for a loaded model, or have its front end made."""
        if model.is_warm and model.serving is not None:
            model.loaded()
        elif model.is_warm and model in self.prepared and model not in self._opening:
            self._opening[model] = asyncio.get_running_loop().create_task(self._open_loaded(model))

    async def _open_loaded(self, model: ServedModel) -> None:
        try:
            await self.open(model)
        except Exception as error:  # the boundary of one model: its callers hear of it
            log.exception("cannot create the front end of %s", model.name)
            model.failed(f"its front end could not be created: {error}", 0.0)
        finally:
            del self._opening[model]

    async def open(self, model: ServedModel) -> None:
        """Connect the model's front end, start its tasks, and wake the calls waiting for it."""
        from melld.api.app import prepare_serving
        from melld.engine.frontend.prepared import fit

        prepared = await fit(self.prepared[model], model.parts.fleet)
        if model not in self.prepared:
            return  # it was removed meanwhile
        self.prepared[model] = prepared
        model.connect(self._parts.template, prepared)
        self._vllm_metrics.keep(model.key, model.parts.config.model, prepared.arguments.tool_call_parser)
        prepare_serving(model.serving)
        for name, work in model.work().items():
            self._tasks.keep(self._name_of(name, model), work)
        model.loaded()

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(model.close() for model in (*self.served, *self._candidates.values(), *self._leaving)))
        for task in self._leaving.values():
            task.cancel()

    def close_logs(self) -> None:
        """Close the decision logs after their last writer is done."""
        for model in (*self.served, *self._leaving):
            if model.parts.decisions is not None:
                model.parts.decisions.close()

    def _name_of(self, task: str, model: ServedModel) -> str:
        return task if model is self._alone else f"{task} of {model.key}"

    # -- a new configuration ----------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Return True if one model has all the devices, with no other added yet."""
        return not self._parts.landlord.tenants

    async def prepare(self, config: Config) -> dict[str, "Prepared"]:
        """Have vLLM read each added or changed model, and those load for which there is room; return them by name.

        Raises:
            ConfigError: the models cannot be served, and none is loaded.
        """
        await self._can_change.wait()
        config = self._with_those_by_hand(config)
        kept = kept_of(self._configured(), config.models)
        fresh = [model for model, index in zip(config.models, kept, strict=True) if index is None]
        read = await asyncio.to_thread(self._read, config, fresh)
        with self._trial({}):
            for model in () if self.is_alone else fresh:
                self._make(config, model, read[model.names[0]])
            return await asyncio.to_thread(self._rehearse, config, read)

    @contextlib.contextmanager
    def _trial(self, prepared: "Mapping[str, Prepared]") -> Iterator[None]:
        """Have all candidates leave, and end their front ends, if the block fails."""
        try:
            yield
        except BaseException:
            while self._candidates:
                model = self._candidates.popitem()[1]
                self.prepared.pop(model, None)
                self._remove(model)
            for one in prepared.values():
                one.frontend.shutdown()
            raise

    def _read(self, config: Config, fresh: Sequence[ModelConfig]) -> dict[str, Any]:
        """Return vLLM's configuration of each model: how large it is."""
        from melld.engine.frontend.rehearsal import read

        for model in fresh:
            preflight.check_model(model.path)
        fitted(config, self._parts.gpus)
        if fresh and self.is_alone:
            self._parts.letting.check_adoption(config, self.served[0])
        return {model.names[0]: read(config.alone(model), kind_of(self._parts.gpus)) for model in fresh}

    def _rehearse(self, config: Config, read: Mapping[str, Any]) -> dict[str, "Prepared"]:
        from melld.engine.frontend.rehearsal import prepare_all

        models = {model.names[0]: config.alone(model) for model in config.models}
        return prepare_all(models, kind_of(self._parts.gpus), read)

    def carry_out(self, config: Config, prepared: "Mapping[str, Prepared]") -> Reloaded:
        """Serve the configured models, of which new ones are prepared, and those loaded by hand; return the changes."""
        config, before = self._with_those_by_hand(config), list(self.served)
        kept = kept_of(self._configured(), config.models)
        with self._trial(prepared):
            if prepared and self.is_alone:
                alone, others = self.served[0], [one.frontend.vllm_config for one in prepared.values()]
                self._parts.letting.adopt(config, alone, self.prepared[alone].frontend.vllm_config, others)
                self._begin_landlord()
            for wanted in config.models:
                if (name := wanted.names[0]) in prepared and name not in self._candidates:
                    self._make(config, wanted, prepared[name].frontend.vllm_config)
            self.served[:] = [
                self._admit(config, model, prepared[model.names[0]]) if index is None else before[index]
                for model, index in zip(config.models, kept, strict=True)
            ]
        for model in before:
            if model in self.served:
                self._follow(model, config.alone(config.models[self.served.index(model)]))
        added, self._candidates = list(self._candidates.values()), {}
        for model in added:
            self._parts.landlord.load_if_room(model)
            self.loaded(model)
        self._by_hand = {name: model for name, model in self._by_hand.items() if model in config.models}
        removed = [model for index, model in enumerate(before) if index not in kept]
        for model in removed:
            self._remove(model)
        names = [tuple(model.name for model in models) for models in (added, removed)]
        return Reloaded(models_added=names[0], models_removed=names[1])

    async def load(self, config: Config, path: str, name: str) -> ServedModel:
        """Serve one more model until the daemon ends, or until it is unloaded.

        Raises:
            ConfigError: there is one of that name, or it cannot be served.
        """
        if self._parts.cluster is not None:
            raise ConfigError("load", "a cluster serves one model")
        if any(name in (*model.names, *(one.name for one in model.lora)) for model in self._configured()):
            raise ConfigError("load", f"model {name!r} already exists")
        self._by_hand[name] = ModelConfig(path=path, name=name)
        try:
            self.carry_out(config, await self.prepare(config))
        except BaseException:
            self._by_hand.pop(name, None)
            raise
        return next(model for model in self.served if model.name == name)

    def unload(self, model: ServedModel, now: bool) -> "asyncio.Task[None] | None":
        """Remove a model that was loaded by hand, and return the task that ends it; None for any other model."""
        if model in self.served:
            if self._by_hand.pop(model.name, None) is None:
                return None
            self.served.remove(model)
            self._remove(model)
        for request in list(model.parts.fleet.live) if now else ():
            model.parts.fleet.requests.end(request, Unloaded(model.name))
        return self._leaving.get(model)

    def _configured(self) -> list[ModelConfig]:
        return [model.parts.config.model for model in self.served]

    def _with_those_by_hand(self, config: Config) -> Config:
        """Return the configuration plus the models loaded by hand, except those that it names itself."""
        names = {name for model in config.served for name in model.names}
        models = (*config.served, *(model for name, model in self._by_hand.items() if name not in names))
        return msgspec.structs.replace(config, model=models[0], models=models)

    def _follow(self, model: ServedModel, config: Config) -> None:
        """Apply new settings to a served model."""
        if config.model != model.parts.config.model:
            model.parts = msgspec.structs.replace(model.parts, config=config)
            self._parts.letting.follow(model, self.prepared[model].frontend.vllm_config)

    def _make(self, config: Config, wanted: ModelConfig, vllm_config: Any) -> None:
        """Make a candidate, and load it if there is room."""
        model = make_candidate(config, wanted, next(self._numbers), self._parts.shared, self._condition)
        self._parts.letting.let_in(model, vllm_config)
        self._candidates[model.name] = model
        self._parts.shared.loans.cover(model.parts.driver.drains)
        self.watch(model)
        self._parts.landlord.load_if_room(model, on_trial=True)

    def _admit(self, config: Config, wanted: ModelConfig, prepared: "Prepared") -> ServedModel:
        """Return the candidate, which can be called from now on."""
        from melld.api.guards.media import follow_no_redirects

        model = self._candidates[wanted.names[0]]
        self.prepared[model] = prepared
        self._follow(model, config.alone(wanted))
        if model.parts.decisions is not None:
            model.parts.decisions.begin()
        if getattr(prepared.arguments, "allowed_media_domains", None):
            follow_no_redirects()
        return model

    def _remove(self, model: ServedModel) -> None:
        self._leaving[model] = asyncio.get_running_loop().create_task(self._end(model))

    async def _end(self, model: ServedModel) -> None:
        """Remove the model once its calls have ended."""
        await self._parts.landlord.tenants[model.key].leave()
        self._parts.shared.loans.drains.remove(model.parts.driver.drains)
        prepared = self.prepared.pop(model, None)
        model.failure = ""
        names = ["hung workers", *(model.work() if model.serving is not None else ())]
        await self._tasks.cancel(*(self._name_of(name, model) for name in names))
        await model.close()
        if prepared is not None:
            prepared.frontend.shutdown()
        if model.parts.decisions is not None:
            model.parts.decisions.close()
        self._vllm_metrics.forget(model.key)
        del self._leaving[model]
        asyncio.get_running_loop().call_soon(gc.collect)  # its front end: all cycles, and large
