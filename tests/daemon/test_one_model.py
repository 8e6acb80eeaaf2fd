"""A single model in a list is a lone model: the same workers, and the same decisions to the byte."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from melld.config_text import parse_config
from melld.daemon import wiring
from melld.daemon.devices import make_slots
from melld.daemon.model import ModelParts
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.watch import Condition
from melld.driver.loans import Loans
from melld.driver.report import MoveMeters
from melld.ids import RequestId, WorkerId
from melld.kvstore.nvml import Nvml
from melld.landlord.landlord import Landlord
from melld.scheduler import events as e
from melld.scheduler.policies.names import POLICIES
from tests.engine.fleet.virtual_worker import VirtualHost

LONE = '[model]\npath = "m"\nname = "chat"\nkeep_alive_s = 30\n'
LISTED = '[[models]]\npath = "m"\nname = "chat"\nkeep_alive_s = 30\n'


def made(text: str, policy: str, log: Path) -> ModelParts:
    """The model's parts, as the daemon makes them, with a decision log."""
    rest = f'[devices]\ncpu = 3\n[scheduler]\npolicy = "{policy}"\ndecision_log = "{log}"\n'
    config = parse_config(text + rest, "test", {})
    (model,) = config.served
    landlord, loans = LandlordShell(Landlord(), lambda: 0.0), Loans(lambda: 0.0)
    meters = MoveMeters(CollectorRegistry())
    shared = wiring.CommonParts([], Nvml(), VirtualHost(), meters, lambda: 0.0, landlord, loans)
    alone = config.alone(model)
    parts = wiring.make_model(alone, make_slots(alone, [], {}), shared, Condition(), len(config.served))
    assert parts.decisions is not None
    parts.decisions.begin()
    return parts


def live(parts: ModelParts, chance: random.Random) -> None:
    """Let three workers serve requests that come, grow, move and end; every decision is recorded."""
    scheduler, taps = parts.driver._scheduler, parts.driver._taps
    sizes: dict[RequestId, int] = {}
    moving: dict[RequestId, WorkerId] = {}

    def tell(event: e.AnyEvent) -> None:
        commands = scheduler.handle(event)
        for tap in taps:
            tap(event, commands, {})
        for command in commands:
            if isinstance(command, e.MoveRequest):
                moving[command.request] = command.destination
            elif isinstance(command, e.RefuseRequest | e.ShedRequest):
                sizes.pop(command.request)

    for number in range(3):
        tell(e.WorkerUp(0.0, WorkerId(f"w{number}"), 1000, 16))
    for step in range(400):
        now_s = step / 10
        if chance.random() < 0.4:
            request = RequestId(f"r{step}")
            sizes[request] = chance.randrange(20, 300)
            tell(e.RequestArrived(now_s, request, sizes[request], sizes[request]))
        for request, worker in list(moving.items()):
            del moving[request]
            tell(e.MoveCommitted(now_s, request, worker))
        grown = {request: size + 10 for request, size in sizes.items() if scheduler.cluster.requests[request].worker}
        sizes |= grown
        tell(e.RequestsGrew(now_s, grown))
        for request in [one for one in grown if chance.random() < 0.08]:
            del sizes[request]
            moving.pop(request, None)
            tell(e.RequestFinished(now_s, request, 10, now_s))
        tell(e.EpochStarted(now_s))
    assert parts.decisions is not None
    parts.decisions.close()


@pytest.mark.parametrize("policy", POLICIES)
async def test_one_model_in_a_list_is_a_lone_model(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lists a single model gets a daemon whose Landlord has no tenants, and the decisions of `[model]`."""
    monkeypatch.setattr(wiring, "time", SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0))
    logs, slots = [], []
    for name, text in (("lone", LONE), ("listed", LISTED)):
        parts = made(text, policy, tmp_path / f"{name}.jsonl")
        live(parts, random.Random(7))
        logs.append((tmp_path / f"{name}.jsonl").read_bytes())
        slots.append([(place.slot, parts.idle.settings) for place in parts.fleet.places.values()])
    assert slots[0] == slots[1]
    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") > 400
