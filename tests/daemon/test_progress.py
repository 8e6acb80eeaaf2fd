"""What is printed while the workers load."""

from melld.config import ClusterConfig, Config, ModelConfig
from melld.daemon.preflight import StartProgress
from melld.engine.fleet.life import Event, State
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.wire import messages as wire
from tests.engine.fleet.virtual_worker import VirtualHost
from tests.serve.offline_daemon import W0, W1, W2, OfflineDaemon


def loading(place: Place) -> WorkerProcess:
    """Return a process in that place that has not been forked yet."""
    place.process = WorkerProcess(place.slot.spec, VirtualHost(), lambda *_: None, lambda _ended: None, Intake())
    return place.process


async def test_workers_wait_until_all_machines_have_joined() -> None:
    """A machine that has joined starts no worker before all required ones have."""
    progress = StartProgress(OfflineDaemon().fleet.supervisor.places.values, lambda _: None, str)
    progress.begun(Config(model=ModelConfig(path="m"), cluster=ClusterConfig(address="auto", min_machines=2)))
    assert progress.line() == "waiting for machines to join (1 of 2)"


async def test_each_line_says_what_every_worker_does() -> None:
    """A minute of loading is not a minute of silence: it shows that there is progress, and how much."""
    places = OfflineDaemon().fleet.supervisor.places
    said: list[str] = []
    far = ["5 of 20 parts imported, 1,830 modules, 612 MiB read"]
    progress = StartProgress(places.values, said.append, lambda: "".join(far))
    processes = [loading(place) for place in places.values()]
    for place in places.values():
        place.life.state, place.offer = State.STARTING, None
    importing = "w0, w1, w2 importing PyTorch and vLLM (takes a while the first time)"
    assert progress.line() == f"{importing}; {far.pop()}"
    assert progress.line() == importing
    for process in processes:
        process.forked(1)
        process._heard(wire.WorkerLoading("loading the model"), [])
    processes[1].printed("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03, 1.17s/it]")
    assert progress.line() == (
        "w0, w2 loading the model; w1 loading the model (Loading safetensors checkpoint shards 25 %)"
    )
    processes[1]._heard(wire.WorkerLoading("allocating its KV cache"), [])
    places[W0].life.take(Event.IS_READY)
    places[W2].life.take(Event.DIED)
    places[W2].process = None
    assert progress.line() == "w1 allocating its KV cache; w2 failed"
    places[W1].life.take(Event.IS_READY)
    places[W2].life.state = State.READY
    assert progress.line() == "preparing the API"
    for place in places.values():
        progress.became_ready(place)
    assert [line.rpartition(" (")[0] for line in said] == [
        f"melld: w{number} is ready on cpu:{number}" for number in range(3)
    ]
