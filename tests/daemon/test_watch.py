"""The daemon's health: whether requests are served, judged by the states of its workers."""

import asyncio
import os
import re
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from melld.cluster.envelopes import Facts, Hello, Readings
from melld.cluster.link import Link
from melld.cluster.machine import Machine
from melld.config import Config, ModelConfig
from melld.control.messages import Drain, Lend, Load, Resume
from melld.control.status import DaemonState, LoanStatus, ModelState, WorkerState, workers_ready
from melld.daemon.history import History
from melld.daemon.lifecycle import Daemon
from melld.daemon.machines import Machines
from melld.daemon.metrics import Metrics
from melld.daemon.model import ModelNotLoaded, ModelParts, ServedModel
from melld.daemon.models import Models
from melld.daemon.obstacles import look_for_obstacle
from melld.daemon.operations import operations_of
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.watch import Condition, Identity, Watch
from melld.daemon.why import Explainer
from melld.decisions.stories import Stories
from melld.driver.drain import WorkerDrain
from melld.driver.idle import IdleSettings, IdleWorkers
from melld.driver.lendable import NeverLent
from melld.engine.fleet.life import MAX_FAILED_STARTS, Event, Intent, State, Who
from melld.engine.fleet.owner import Owner
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.wire import messages as wire
from melld.errors import UnknownWorker
from melld.kvstore.device_reading import DeviceReading, DeviceState
from melld.kvstore.worker_readings import WorkerReading
from melld.landlord.division import Division
from melld.landlord.landlord import Landlord
from melld.landlord.placement import LandlordSettings
from melld.tasks import Tasks
from tests.patience import PATIENCE_S
from tests.serve.offline_daemon import W0, W1, W2, OfflineDaemon


class Hand(Daemon):
    """Serves no model that the configuration does not name."""

    def __init__(self) -> None:
        """It is asked for nothing else."""

    async def load(self, path: str, name: str) -> ServedModel:
        raise AssertionError(path, name)

    async def unload(self, model: ServedModel, now: bool) -> bool:
        return False


class Watched:
    """A daemon that has been ready, with three workers and its watch."""

    def __init__(self) -> None:
        daemon = self.daemon = OfflineDaemon()
        self.drains = daemon.driver.drains
        history = History(daemon.scheduler, daemon.clock)
        idle = IdleWorkers(daemon.fleet, daemon.scheduler.cluster, IdleSettings(None, None), daemon.clock)
        why = Explainer(daemon.scheduler, daemon.driver, history, idle, daemon.clock)
        identity = Identity(pid=1, policy="most-free", url="", started_s=0.0)
        parts = ModelParts(
            config=Config(model=ModelConfig(path="m", name="demo")),
            fleet=daemon.fleet,
            driver=daemon.driver,
            cluster=daemon.scheduler.cluster,
            idle=idle,
            history=history,
            stories=Stories(10),
            why=why,
        )
        self.model = ServedModel(parts)
        self.landlord = LandlordShell(Landlord(), daemon.clock)
        self.condition = Condition(state=DaemonState.READY)
        self.machines = Machines(parts.config, {}, daemon.fleet)
        self.watch = Watch([self.model], identity, self.condition, None, self.landlord, self.machines)
        self.fleet = daemon.fleet
        self.places: list[Place] = list(daemon.fleet.supervisor.places.values())
        for place in self.places:
            place.life.wish(Who.DAEMON, Intent.IN_SERVICE)
            place.life.state = State.READY

    def metric(self, name: str) -> list[float]:
        registry = CollectorRegistry()
        registry.register(Metrics(self.watch, [self.model], self.landlord))  # type: ignore[arg-type]
        return [sample.value for family in registry.collect() for sample in family.samples if sample.name == name]


def test_the_daemon_is_ready_while_one_worker_serves_or_can_wake() -> None:
    """A load balancer sends requests to a daemon whose workers sleep or have no process: they are woken."""
    watched = Watched()
    for event in (Event.SLEEP, Event.STOP, Event.ENDED, Event.WAKE):
        for place in watched.places:
            place.life.take(event)
        assert watched.watch.why_not_ready() is None, watched.places[0].state
        assert watched.metric("melld_ready") == [1.0]
        assert watched.metric("melld_worker_ready") == [1.0] * 3


def test_the_daemon_is_not_ready_when_no_worker_can_serve() -> None:
    """Load balancers send nobody there; a client that comes anyway waits while workers restart."""
    watched = Watched()
    for place in watched.places[:-1]:
        place.life.take(Event.DIED)
        assert watched.watch.why_not_ready() is None
    watched.places[-1].life.take(Event.DIED)
    assert watched.watch.why_not_ready() == "no worker can serve: w0 failed, w1 failed, w2 failed"
    assert watched.watch.why_closed() is None
    assert watched.metric("melld_ready") == [0.0]
    watched.places[0].offer = None
    watched.places[0].life.take(Event.RETRY)
    assert watched.watch.why_not_ready() is not None
    watched.places[0].life.take(Event.IS_READY)
    assert watched.watch.why_not_ready() is None


def test_requests_are_refused_once_no_worker_will_be_restarted() -> None:
    """At once, instead of after five minutes in a queue."""
    watched = Watched()
    for place in watched.places:
        place.life.take(Event.DIED)
        place.life.failed_starts = MAX_FAILED_STARTS
    assert watched.watch.why_closed() == "no worker can serve: w0 failed, w1 failed, w2 failed"


def test_the_service_manager_hears_when_nobody_can_be_served() -> None:
    """Its watchdog restarts a daemon that has given up all workers; otherwise the daemon restarts them itself."""
    watched = Watched()
    assert watched.watch.beat().well
    for place in watched.places:
        place.life.take(Event.DIED)
    beat = watched.watch.beat()
    assert (beat.well, beat.status.startswith("no worker can serve: w0 failed")) == (True, True)
    for place in watched.places:
        place.life.failed_starts = MAX_FAILED_STARTS
    assert not watched.watch.beat().well
    watched.condition.state = DaemonState.STARTING
    assert watched.watch.beat().well


def test_a_drained_worker_does_not_count_as_able_to_serve() -> None:
    """Its process may be warm or startable, but its device is not the daemon's now."""
    watched = Watched()
    watched.drains.by_worker[W0] = WorkerDrain(watched.places[0], 0.0)
    for place in watched.places[1:]:
        place.life.take(Event.DIED)
        place.life.failed_starts = MAX_FAILED_STARTS
    assert watched.watch.why_closed() == "no worker can serve: w0 draining, w1 failed, w2 failed"


def test_requests_wait_for_lent_workers_and_the_status_names_the_borrower() -> None:
    """The workers will return, so a daemon without others is not ready but needs no restart."""
    watched = Watched()
    loan = Lend(command="train", pid=7, user="ann", held_s=60.0)
    for worker in (W0, W1, W2):
        watched.drains.by_worker[worker] = WorkerDrain(watched.fleet.places[worker], watched.daemon.clock(), loan)
    watched.drains.by_worker[W0].total_s = 1.0
    assert watched.watch.why_not_ready() == "no worker can serve: w0 lent, w1 draining, w2 draining"
    assert watched.watch.why_closed() is None
    lent, emptying, _ = watched.watch.status().workers
    assert (lent.state, lent.why) == (WorkerState.LENT, "lent to `train` (pid 7, ann)")
    assert lent.loan == LoanStatus(command="train", pid=7, user="ann", age_s=60.0)
    assert emptying.why == "draining: 0 requests left; to be lent to `train` (pid 7, ann)"


def test_the_daemon_s_own_start_or_drain_overrides_its_workers_states() -> None:
    """Its own state goes first."""
    watched = Watched()
    watched.condition.state = DaemonState.DRAINING
    assert watched.watch.why_not_ready() == watched.watch.why_closed() == "draining"


def test_sleeping_workers_count_as_ready() -> None:
    """An idle machine does not look like a broken one."""
    watched = Watched()
    watched.places[0].life.take(Event.SLEEP)
    for event in (Event.STOP, Event.ENDED):
        watched.places[1].life.take(event)
    assert workers_ready(watched.watch.status().workers) == "3 of 3 workers ready (2 at rest)"
    watched.places[2].life.take(Event.DIED)
    watched.fleet.worker_ended(watched.places[2].slot, WorkerEnded("w2", "", expected=False))
    assert workers_ready(watched.watch.status().workers) == "2 of 3 workers ready (2 at rest)"
    assert watched.watch.status().workers[1].state is WorkerState.STOPPED


def test_a_sleeping_worker_reports_how_fast_it_would_wake_now() -> None:
    """A warm one answers at once; only one without a process takes a full start."""
    watched = Watched()
    place = watched.places[0]
    place.wake_s = 5.5
    place.life.take(Event.SLEEP)
    assert "wakes instantly" in watched.watch.status().workers[0].why
    for event in (Event.STOP, Event.ENDED):
        place.life.take(event)
        assert "wakes in about 5.5 s" in watched.watch.status().workers[0].why


def test_a_link_that_carries_no_kv_says_why() -> None:
    """Moves by tokens cost compute: the status answers the question without reading logs."""
    watched = Watched()
    fleet = watched.fleet
    no_access = "cuda_peer: device 0 has no peer access to device 1"
    fleet.worker_said(fleet.slots[W1], wire.LinkOpened(peer=W0, failure=no_access), [])
    watched.daemon.up(W2, kv_failure="the KV cache is 2 allocations, not one")
    told = {(link.source, link.destination): link for link in watched.watch.status().links}
    assert {ends: link.tokens_only_because for ends, link in told.items()} == {
        (W0, W1): no_access,
        (W1, W0): "",
        (W2, W0): "the KV cache is 2 allocations, not one",
        (W2, W1): "the KV cache is 2 allocations, not one",
        (W0, W2): "the link is not open yet",
        (W1, W2): "the link is not open yet",
    }
    assert (told[W1, W0].transport, told[W1, W0].bytes_per_s) == ("shared_memory", 5e4)
    assert told[W0, W1].transport is None


async def test_an_unknown_worker_s_error_lists_machines_too() -> None:
    """A mistyped address must not look as if machines could not be drained."""
    watched = Watched()
    hello = Hello(token="", machine="10.0.0.2", facts=Facts({}, {}), devices=())
    machine = Machine(hello, Link(None, None, lambda *_: None, lambda _: None), watched.machines.machine_lost)
    watched.machines.machine_joined(machine)
    operations = operations_of([watched.model], watched.landlord, watched.machines, Hand())
    for asked in (Drain(worker="10.0.0.3"), Resume(worker="10.0.0.3")):
        with pytest.raises(UnknownWorker, match=r"available: w0, w1, w2, 10\.0\.0\.2$"):
            await operations[type(asked).__name__.lower()].act(asked)


async def test_devices_that_the_daemon_shares_are_not_lent() -> None:
    """A borrower is told in one line who does hand them out."""
    watched, clustered = Watched(), Watched()
    hello = Hello(token="", machine="m1", facts=Facts({}, {}), devices=())
    machine = Machine(hello, Link(None, None, lambda *_: None, lambda _: None), clustered.machines.machine_lost)
    clustered.machines.machine_joined(machine)
    several = LandlordShell(Landlord(LandlordSettings()), watched.daemon.clock)
    several.division = Division(lent_bytes=1000)
    asked = Lend(command="train", pid=7, user="ann")
    for parts, why in (
        ((watched.landlord, clustered.machines), "Ray allocates"),
        ((several, watched.machines), "lend each other GPU memory"),
    ):
        with pytest.raises(NeverLent, match=why):
            await operations_of([watched.model], *parts, Hand())["lend"].act(asked, None)


async def test_load_does_not_wait_for_a_lone_model_without_a_process() -> None:
    """`melld load` says at once that only a request wakes its workers, instead of after five minutes."""
    watched = Watched()
    load = operations_of([watched.model], watched.landlord, watched.machines, Hand())["load"].act
    watched.model.serving = object()
    assert (await load(Load(model="demo"))).state is ModelState.LOADED
    for place in watched.places:
        for event in (Event.STOP, Event.ENDED):
            place.life.take(event)
    with pytest.raises(ModelNotLoaded, match="demo is the only model"):
        await asyncio.wait_for(load(Load(model="demo")), PATIENCE_S)


async def test_a_remote_worker_yields_to_other_users_of_its_gpu() -> None:
    """As a local one does: its requests leave before another program takes the memory that its steps need."""
    watched = Watched()
    hello = Hello(token="", machine="m1", facts=Facts({}, {}), devices=())
    machine = Machine(hello, Link(None, None, lambda *_: None, lambda _: None), watched.machines.machine_lost)
    watched.machines.machine_joined(machine)
    place = watched.places[0]
    place.slot = msgspec.structs.replace(place.slot, uuids=("GPU-1",), machine="m1")
    place.process = WorkerProcess(place.slot.spec, machine, lambda *_: None, lambda _: None, Intake())
    place.process.forked(7)
    capacity_bytes = watched.watch.status().workers[0].capacity_bytes

    async def read(pid: int, others_bytes: int) -> int:
        """Return what the scheduler counts on after this reading."""
        reading = DeviceReading(state=DeviceState.OK, used_bytes=5, used_by_others_bytes=others_bytes)
        machine._received(Readings({"w0": WorkerReading(pid, reading)}), [])
        await watched.watch.look()
        return watched.daemon.scheduler.cluster.workers[W0].capacity_bytes

    assert await read(7, 1000) == capacity_bytes
    assert await read(7, 1000 + capacity_bytes // 2) == capacity_bytes // 2
    assert watched.watch.status().workers[0].memory_bytes == 5
    assert await read(6, 1000) == capacity_bytes // 2, "of its process before"
    assert await read(7, 1000) == capacity_bytes


async def test_callers_hear_when_a_loaded_model_s_front_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait until their deadline; the next call tries again."""
    model, made = Watched().model, []

    async def fail(model: ServedModel) -> None:
        made.append(model.name)
        raise OSError("no tokenizer")

    models = Models(SimpleNamespace(models=[model]), Condition(), Tasks())  # type: ignore[arg-type]
    models.prepared[model] = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(models, "open", fail)
    for _ in range(2):
        waiting = asyncio.ensure_future(model.until_loaded())
        await asyncio.sleep(0)
        models.loaded(model)
        with pytest.raises(ModelNotLoaded, match="its front end could not be created: no tokenizer"):
            await waiting
    assert made == ["demo", "demo"]


async def test_a_worker_waits_while_another_program_fills_its_gpu() -> None:
    """The failed start was not its fault: the log names the program, and the start follows once memory is back."""
    watched = Watched()
    place = watched.places[0]
    place.slot = msgspec.structs.replace(place.slot, device="cuda:0", uuids=("GPU-0",))
    supervisor = watched.fleet.supervisor
    held = {"total_bytes": 100 << 20, "used_bytes": 90 << 20}
    full = DeviceReading(state=DeviceState.OK, used_by_others_bytes=90 << 20, others=((os.getpid(), 80 << 20),), **held)
    free = msgspec.structs.replace(full, used_by_others_bytes=1 << 20, others=())
    place.life.take(Event.DIED)
    look_for_obstacle(place, supervisor, full)
    assert not place.life.obstacle, "its death as it ran is another matter"
    place.life.take(Event.RETRY)
    place.life.take(Event.DIED)
    for _ in range(3):
        look_for_obstacle(place, supervisor, full)
    assert (place.life.failed_starts, place.life.given_up, place.timer) == (0, False, None)
    state, reason = watched.model.state_of(place)
    assert state is WorkerState.WAITING
    assert f"(pid {os.getpid()}) holds 80 MiB of cuda:0, of which it needs 92%" in reason
    for other in watched.places[1:]:
        other.life.take(Event.DIED)
    assert f"waiting ({reason})" in str(watched.model.why_not_ready())
    assert watched.model.why_closed() is None
    look_for_obstacle(place, supervisor, free)
    assert not place.life.obstacle
    assert place.timer is not None, "it starts after a rest"


@pytest.mark.parametrize(("owner", "told"), [(None, "; restarts in"), (Owner(), "; will not be retried for")])
async def test_a_dead_worker_s_rest_is_counted_down(owner: Owner | None, told: str) -> None:
    """Operators see what is left of it; nobody is told to wait for a rest that is over."""
    watched, loop = Watched(), asyncio.get_running_loop()
    place = watched.places[0]
    if owner is not None:
        watched.fleet.supervisor.owner = owner
    place.life.take(Event.DIED)
    place.rested_s = loop.time() + 1000.0
    state, said = watched.model.state_of(place)
    assert state is WorkerState.FAILED
    assert re.fullmatch(rf"{re.escape(place.detail + told)} (9\d\d|1000) s", said)
    place.rested_s = 0.0
    assert watched.model.state_of(place)[1] == place.detail
    place.timer = loop.call_later(500.0, print)
    assert re.fullmatch(rf"{re.escape(place.detail + told)} (4\d\d|500) s", watched.model.state_of(place)[1])
