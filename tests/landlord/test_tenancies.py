"""Several models in the simulator: everything is served, memory is accounted for, and one model is the trivial case."""

import random

import msgspec
import pytest

from benchmarks.models.tenancies.experiment import TENANCIES, run_tenancy
from benchmarks.models.tenancies.setting import ModelArrival, RatedModel, Setting, arrivals, power_law
from benchmarks.models.tenancies.simulation import ModelsSimulation
from melld.ids import ModelName
from melld.landlord import events as e
from melld.landlord.landlord import Landlord
from melld.simulator.catalogue import CARDS, MODELS
from melld.simulator.workload import LogNormal
from tests.landlord.law import check_landlord

CHAT = LogNormal(88.0, 1.1, 240.0, 0.83)


def setting(count: int, rate_per_s: float, devices: int = 1, model: str = "llama-2-7b") -> Setting:
    rates = power_law(count, rate_per_s, 0.9)
    served = (RatedModel(ModelName(f"m{index}"), MODELS[model], rate) for index, rate in enumerate(rates))
    return Setting(tuple(served), CARDS["a100-80g"], devices)


def load_of(estate: Setting, seconds: float = 120.0) -> list[ModelArrival]:
    return arrivals(estate.models, seconds, CHAT, random.Random(3))


class Checked:
    """A Landlord whose law is checked after every event, and whose commands are kept."""

    def __init__(self) -> None:
        self.landlord = Landlord()
        self.commands: list[e.LandlordCommand] = []

    def handle(self, event: e.LandlordEvent) -> list[e.LandlordCommand]:
        commands = self.landlord.handle(event)
        check_landlord(self.landlord)
        self.commands += commands
        return commands


@pytest.mark.parametrize("name", TENANCIES)
def test_every_request_is_served_under_every_tenancy(name: str) -> None:
    """So that the comparison is fair."""
    estate = setting(4, 0.7)
    simulation = ModelsSimulation(estate, load_of(estate, 90.0), TENANCIES[name](estate))
    simulation.run()
    assert simulation._requests == {}
    assert not any(one.running or one.held or one.used_blocks for one in simulation.instances.values())


def test_memory_is_accounted_for_after_every_event() -> None:
    """Four models that leave one device little room, under a load that keeps them short of it."""
    estate, tenancy = setting(4, 5.0), Checked()
    simulation = ModelsSimulation(estate, load_of(estate, 60.0), tenancy)
    simulation.run()
    kinds = {type(command) for command in tenancy.commands}
    assert {e.GrantKv, e.TakeKv, e.LoadModel} <= kinds
    for name, instance in simulation.instances.items():
        ledger = tenancy.landlord.instances[name].house.ledger
        assert ledger.granted(name) == len(instance.granules)


def test_lending_serves_more_on_time_than_a_split_when_memory_is_short() -> None:
    """This is what the Landlord is for."""
    estate = setting(4, 4.5)
    load = load_of(estate, 120.0)
    lending, split = (run_tenancy(name, estate, load).attainment for name in ("lending", "split"))
    assert lending > split + 0.1


def test_a_device_is_counted_once_whatever_its_models_names() -> None:
    """A name may contain an `@`, as model revisions do."""
    plain = setting(2, 0.7)
    first, *others = plain.models
    named = msgspec.structs.replace(plain, models=(msgspec.structs.replace(first, name=ModelName("m@v1")), *others))
    device_s = [run_tenancy("lending", estate, load_of(estate)).device_seconds for estate in (plain, named)]
    assert device_s[0] == device_s[1] > 0.0


def test_equal_seeds_give_equal_reports() -> None:
    """Figures are reproducible."""
    estate = setting(3, 1.0)
    first, second = (run_tenancy("lending", estate, load_of(estate, 40.0)) for _ in range(2))
    assert first == second


def test_popularity_falls_with_the_rank() -> None:
    """MuxServe's rates: a greater exponent gives more to the first."""
    even, skewed = power_law(4, 10.0, 0.9), power_law(4, 10.0, 2.1)
    assert sum(even) == pytest.approx(10.0)
    assert sorted(even, reverse=True) == even
    assert skewed[0] > even[0]
