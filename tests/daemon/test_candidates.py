"""A model that a reload adds and vLLM refuses as it loads: nothing of it stays, and no other model has noticed."""

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from melld.config import Config, ModelConfig
from melld.daemon.lifecycle import Daemon
from melld.daemon.model import ServedModel
from melld.daemon.models import Models
from melld.daemon.town.tenant import Tenant
from melld.errors import ConfigError
from melld.ids import DeviceName, ModelName
from melld.landlord import events as e
from melld.landlord.instance import InstanceState
from melld.tasks import Tasks
from tests.daemon.virtual_town import WEIGHTS, BorrowersHost, Town
from tests.engine.fleet.virtual_daemon import SOON_STEADY, VirtualDaemon
from tests.engine.fleet.virtual_loop import VirtualLoop, run_virtually
from tests.engine.fleet.virtual_worker import BLOCK_BYTES


class Reload:
    """Models of a virtual town, and candidates whose settings vLLM tries for five seconds."""

    def __init__(self, town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
        self.town = town
        self.made: dict[str, VirtualDaemon] = {}
        served = list(town.models.values())
        letting = SimpleNamespace(let_in=self._let_in, follow=lambda *_: None)
        shared: Any = SimpleNamespace(loans=town.loans, landlord=town.shell, gpus=[])
        parts: Any = SimpleNamespace(
            models=served, landlord=town.shell, letting=letting, shared=shared, gpus=[], cluster=None
        )
        condition: Any = None
        self.models = Models(parts, condition, Tasks())
        self.models._can_change.set()
        self.models._vllm_metrics = SimpleNamespace(forget=lambda _: None)
        monkeypatch.setattr("melld.daemon.wiring.make_model", self._make)
        monkeypatch.setattr("asyncio.to_thread", self._here)
        monkeypatch.setattr(self.models, "_read", lambda _, fresh: {one.names[0]: None for one in fresh})
        monkeypatch.setattr(self.models, "_rehearse", lambda *_: self._refuse())

    @staticmethod
    async def _here(work: Callable[..., Any], *arguments: Any) -> Any:
        done = work(*arguments)
        return await done if asyncio.iscoroutine(done) else done

    async def _refuse(self) -> None:
        await asyncio.sleep(5.0)
        raise ConfigError("[model.vllm]", "refused")

    def _make(self, config: Config, *_: Any) -> Any:
        name = config.model.names[0]
        if name == "broken":
            raise OSError("no room for its files")
        made = self.made[name] = VirtualDaemon(
            self.town.loop, 1, "mell-slo", SOON_STEADY, owner=self.town.shell, name=name, host=BorrowersHost,
            loans=self.town.loans,
        )  # fmt: skip
        parts = next(iter(self.town.models.values())).parts
        return msgspec.structs.replace(
            parts, config=config, fleet=made.fleet, driver=made.driver, cluster=made.cluster, idle=made.idle
        )

    def _let_in(self, model: ServedModel, _: Any) -> None:
        now_s, [worker] = self.town.loop.time(), model.parts.fleet.places
        told = e.ModelDeclared(
            now_s, model.key, WEIGHTS * BLOCK_BYTES, BLOCK_BYTES, 1.0, pinned=model.parts.config.model.pinned
        )
        there = e.InstanceDeclared(now_s, worker, model.key, DeviceName("d0"))
        self.town.shell.take_over([told, there], [Tenant(model, BLOCK_BYTES, lends=True)], {})

    def config(self, *added: ModelConfig) -> Config:
        models = (*(model.parts.config.model for model in self.town.models.values()), *added)
        return Config(model=models[0], models=models)

    def tenants(self) -> list[ModelName]:
        return list(self.town.shell.tenants)


async def gone(town: Town) -> None:
    """Pass what the Landlord's shell takes to let a model leave; no worker becomes ready."""
    for _ in range(4):
        await town.settle()
        await asyncio.sleep(0.25)


def test_one_that_is_refused_as_it_loads_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would load to the end otherwise, and hold memory that others may use."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=40).start()
        reload = Reload(town, monkeypatch)
        trying = asyncio.ensure_future(reload.models.prepare(reload.config(ModelConfig(path="", name="more"))))
        await gone(town)
        [place] = reload.made["more"].fleet.places.values()
        assert (town.states()[place.slot.worker], place.process is None) == (InstanceState.LOADING, False)
        await asyncio.sleep(5.0)
        with pytest.raises(ConfigError, match="refused"):
            await trying
        for _ in range(8):
            await gone(town)
            await reload.made["more"].settle()
            for worker in reload.made["more"].workers():
                worker.obey()
        assert (place.process, reload.tenants()) == (None, ["a", "b"])
        town.check()
        await town.close()

    run_virtually(history)


def test_a_pin_unloads_nobody_before_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle model would leave for one that is not served after all."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=12).start()
        reload = Reload(town, monkeypatch)
        before = town.states()
        await asyncio.sleep(60.0)
        more = ModelConfig(path="", name="more", pinned=True)
        with pytest.raises(ConfigError, match="refused"):
            await reload.models.prepare(reload.config(more))
        await gone(town)
        assert (town.states(), reload.tenants()) == (before, ["a", "b"])
        await town.close()

    run_virtually(history)


def test_one_that_cannot_be_made_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first of them would stay in memory for ever, and nobody could call it."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=12).start()
        reload = Reload(town, monkeypatch)
        added = [ModelConfig(path="", name=name) for name in ("more", "broken")]
        with pytest.raises(OSError, match="no room"):
            await reload.models.prepare(reload.config(*added))
        await gone(town)
        assert reload.tenants() == ["a", "b"]
        await town.close()

    run_virtually(history)


def test_a_model_is_unloaded_once_a_reload_has_been_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reload keeps it without having prepared it, and fails half-way if it has gone meanwhile."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=40).start()
        reload = Reload(town, monkeypatch)
        models, config = reload.models, reload.config()
        models._by_hand["b"] = town.models["b"].parts.config.model
        monkeypatch.setattr(models, "_rehearse", lambda *_: asyncio.sleep(5.0, {}))
        daemon: Any = SimpleNamespace(_models=models, settings=SimpleNamespace(changing=asyncio.Lock()))

        async def judged() -> None:
            async with daemon.settings.changing:
                models.carry_out(config, await models.prepare(config))

        judging = asyncio.ensure_future(judged())
        await gone(town)
        unloading = asyncio.ensure_future(Daemon.unload(daemon, town.models["b"], now=False))
        await gone(town)
        assert [model.name for model in models.served] == ["a", "b"]
        await judging
        await gone(town)
        assert [model.name for model in models.served] == ["a"]
        unloading.cancel()
        await town.close()

    run_virtually(history)


def test_a_model_that_went_while_its_unload_waited_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another unload, or by the reload that both waited for."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=40).start()
        models = Reload(town, monkeypatch).models
        daemon: Any = SimpleNamespace(_models=models, settings=SimpleNamespace(changing=asyncio.Lock()))
        gone = town.models["b"]
        assert not await Daemon.unload(daemon, gone, now=False), "it was not loaded by hand"
        models.served.remove(gone)
        assert await Daemon.unload(daemon, gone, now=False)
        await town.close()

    run_virtually(history)


def test_a_reload_that_fails_half_way_leaves_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could be called already would be in no list, and keep its front end and its memory."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=40).start()
        reload, ended = Reload(town, monkeypatch), list[str]()

        def prepared(name: str) -> Any:
            end = functools.partial(ended.append, name)
            return SimpleNamespace(frontend=SimpleNamespace(shutdown=end, vllm_config=None), arguments=None)

        def follow(model: ServedModel, _: object) -> None:
            if model.name == "more still":
                raise OSError("no room for its log")

        names, models = ("more", "more still"), reload.models
        models._parts.letting.follow = follow  # type: ignore[method-assign]
        monkeypatch.setattr(models, "_rehearse", lambda *_: {name: prepared(name) for name in names})
        config = reload.config(*(ModelConfig(path="", name=name, pinned=True) for name in names))
        fronts = await models.prepare(config)
        with pytest.raises(OSError, match="no room"):
            models.carry_out(config, fronts)
        await gone(town)
        assert [model.name for model in models.served] == reload.tenants() == ["a", "b"]
        assert (sorted(ended), models.prepared, models._candidates) == (sorted(names), {}, {})
        await town.close()

    run_virtually(history)


def test_a_model_by_hand_that_cannot_be_served_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later reload would try it again, and fail."""

    async def history(loop: VirtualLoop) -> None:
        town = await Town(loop, 2, 1, granules=40).start()
        reload = Reload(town, monkeypatch)
        monkeypatch.setattr(reload.models, "_rehearse", lambda *_: {})
        with pytest.raises(KeyError, match="more"):
            await reload.models.load(reload.config(), "", "more")
        await gone(town)
        assert len(reload.models._with_those_by_hand(reload.config()).models) == 2
        assert (reload.tenants(), reload.models._candidates) == (["a", "b"], {})
        await town.close()

    run_virtually(history)
