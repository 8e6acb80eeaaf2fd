"""What the Landlord does with models and memory, case by case."""

import pytest

from melld.errors import IllegalTransition
from melld.ids import EventId, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.landlord import LandlordSettings
from tests.landlord.estate import GRANULES, WEIGHTS, Town, estate, of
from tests.landlord.law import check_landlord

LEFT = GRANULES - WEIGHTS
WAITS = e.ModelLoad(arrivals=1, waiting=1, first_bytes=1)


def test_free_memory_is_lent_to_any_model_that_needs_it() -> None:
    """A model is not held to a share while the rest is unused."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    assert town.offers == {"chat@d0": GRANULES - 2 * WEIGHTS - 1, "code@d0": GRANULES - 2 * WEIGHTS - 1}
    town.need("chat@d0", 30)
    assert len(town.granules["chat@d0"]) == 30
    assert town.offers["code@d0"] == GRANULES - 2 * WEIGHTS - 30


def test_surplus_memory_goes_to_the_next_model() -> None:
    """Memory flows back when the load does, and only as much as is needed and the floor allows."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    town.need("chat@d0", 39)
    town.need("chat@d0", 0)
    assert len(town.granules["chat@d0"]) == 39, "unwanted memory stays: prefix caches are warm there"
    commands = town.need("code@d0", 39)
    assert of(e.TakeKv, commands) == ["chat@d0"]
    assert len(town.granules["code@d0"]) == 39
    assert len(town.granules["chat@d0"]) == 1


def test_two_models_are_not_promised_the_same_bytes() -> None:
    """What one scheduler has placed is gone from the other's offer before that decides."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    for step in range(1, 20):
        town.need("chat@d0", step)
        assert town.offers["code@d0"] + step <= GRANULES - 2 * WEIGHTS
        town.need("code@d0", step)
        assert town.offers["chat@d0"] + step <= GRANULES - 2 * WEIGHTS


def test_a_take_that_times_out_loses_no_granules() -> None:
    """A hung worker does not starve the others, and what it returns late still counts."""
    town = Town(estate("chat", "code", "tiny", resident_bytes=20 * 2**20), answers_takes=False)
    town.pass_time(0.0)
    for model in ("chat", "code", "tiny"):
        town.want(f"{model}@d0")
    town.need("chat@d0", 20)
    town.need("code@d0", 18)
    town.need("chat@d0", 0)
    town.need("code@d0", 0)
    assert of(e.TakeKv, town.need("tiny@d0", 10)) == ["chat@d0"]
    commands = town.tell(e.KvReturned(2.0, WorkerId("chat@d0"), ()))
    assert of(e.TakeKv, commands) == ["code@d0"]
    town.give_back("code@d0", 9)
    town.give_back("chat@d0", 5)
    assert len(town.granules["tiny@d0"]) == 10
    check_landlord(town.landlord)


def test_the_next_grant_goes_to_the_model_that_had_least() -> None:
    """In proportion to its rate."""
    town = Town(estate("chat", "code", "tiny", resident_bytes=20 * 2**20), answers_takes=False)
    busy = e.ModelLoad(arrivals=5)
    town.pass_time(0.0)
    for model in ("chat", "code", "tiny"):
        town.want(f"{model}@d0")
    town.pass_time(1.0, chat=busy, code=busy, tiny=busy)
    town.need("chat@d0", 15, 1.0)
    town.need("tiny@d0", 20, 1.0)
    town.need("tiny@d0", 0, 20.0)
    town.need("chat@d0", 25, 30.0)
    town.need("code@d0", 11, 30.0)
    before = {name: len(granules) for name, granules in town.granules.items()}
    town.give_back("tiny@d0", 5)
    assert len(town.granules["code@d0"]) - before["code@d0"] == 5
    assert len(town.granules["chat@d0"]) == before["chat@d0"]


def test_an_idle_model_leaves_for_one_that_is_wanted() -> None:
    """Three models of which two fit: the longest unused one dozes, and nothing that runs is touched."""
    town = Town(estate("chat", "code", "draw", resident_bytes=45 * 2**20))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    town.need("chat@d0", 2, 1.0)
    town.pass_time(30.0)
    assert town.offers["draw@d0"] > 0
    commands = town.want("draw@d0", 30.0)
    assert of(e.DozeModel, commands) == ["code@d0"]
    assert of(e.LoadModel, commands) == ["draw@d0"]
    assert of(e.ReopenInstance, commands) == ["code@d0"]


def test_a_pinned_model_is_loaded_on_its_own_and_never_leaves() -> None:
    """Whatever the others want and however idle it is."""
    town = Town(estate("chat", "code"))
    town.landlord.handle(e.ModelDeclared(0.0, ModelName("embed"), 45 * 2**20, 2**17, 10.0, pinned=True))
    town.landlord.handle(
        e.InstanceDeclared(0.0, WorkerId("embed@d0"), ModelName("embed"), next(iter(town.landlord.houses)))
    )
    assert of(e.LoadModel, town.pass_time(0.0)) == ["embed@d0"]
    town.want("chat@d0", 1.0)
    town.need("chat@d0", 1, 1.0)
    told = [town.pass_time(float(at_s), code=WAITS) for at_s in range(30, 1000, 10)]
    left = [name for commands in told for kind in (e.DozeModel, e.UnloadModel) for name in of(kind, commands)]
    assert "embed@d0" not in left


def test_a_model_without_room_waits_and_then_displaces_another() -> None:
    """Nobody waits forever; the one that makes room first completes its requests."""
    town = Town(estate("chat", "code", resident_bytes=60 * 2**20))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.need("chat@d0", 5, 1.0)
    assert of(e.DrainInstance, town.pass_time(25.0, code=WAITS)) == []
    commands = town.pass_time(36.0, code=WAITS)
    assert of(e.DrainInstance, commands) == ["chat@d0"]
    assert of(e.DozeModel, commands) == [], "its request still runs"
    commands = town.need("chat@d0", 0, 40.0)
    assert of(e.DozeModel, commands) == ["chat@d0"]
    assert of(e.LoadModel, commands) == ["code@d0"]


def test_unused_weights_make_room_for_kv() -> None:
    """A model whose requests wait for room gets that of a model that is only kept warm."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    town.need("chat@d0", 39, 1.0)
    assert town.offers["chat@d0"] == 39
    told = [town.pass_time(float(at_s), chat=WAITS) for at_s in (2, 8, 13)]
    assert [of(e.DozeModel, commands) for commands in told] == [[], [], ["code@d0"]]
    assert town.offers["chat@d0"] == LEFT


def test_an_idle_model_dozes_then_stops() -> None:
    """keep_alive and stop_after_s count from its last use."""
    town = Town(estate("chat", "code", keep_alive_s=60.0, stop_after_s=100.0))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.need("chat@d0", 3, 1.0)
    town.need("chat@d0", 0, 50.0)
    assert of(e.DozeModel, town.pass_time(100.0)) == []
    assert of(e.DozeModel, town.pass_time(111.0)) == ["chat@d0"]
    assert of(e.UnloadModel, town.pass_time(200.0)) == []
    assert of(e.UnloadModel, town.pass_time(212.0)) == ["chat@d0"]


def test_weights_beyond_the_doze_limit_are_unloaded() -> None:
    """The machine's memory is not filled with sleeping models."""
    town = Town(estate("chat", "code", keep_alive_s=60.0, settings=LandlordSettings(host_cache_bytes=WEIGHTS * 2**20)))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d0")
    commands = town.pass_time(61.0)
    assert of(e.DozeModel, commands) == ["chat@d0"]
    assert of(e.UnloadModel, commands) == ["code@d0"]


def test_the_emptier_device_is_given_up() -> None:
    """Two half-used devices become one; the schedulers move the requests, and none is cut."""
    town = Town(estate("chat", "code", devices=2))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d1")
    town.need("chat@d0", 5, 1.0)
    town.need("code@d1", 2, 1.0)
    told = [town.pass_time(float(at_s)) for at_s in range(5, 100, 5)]
    loads = [name for commands in told for name in of(e.LoadModel, commands)]
    drains = [name for commands in told for name in of(e.DrainInstance, commands)]
    assert (loads, drains) == (["code@d0"], ["code@d1"])
    assert of(e.DozeModel, town.need("code@d1", 0, 100.0)) == ["code@d1"]


def test_an_unloaded_model_returns_only_for_a_request() -> None:
    """A scheduler keeps its instance in service; what an operator unloaded stays so until a request comes."""
    town = Town(estate("chat", "code", devices=2, dozes=False))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.tell(e.UnloadAsked(1.0, WorkerId("chat@d0")))
    offered = next(name for name in ("chat@d0", "chat@d1") if town.offers[name])
    assert of(e.LoadModel, town.tell(e.WorkerActivated(2.0, WorkerId(offered)))) == []
    assert of(e.LoadModel, town.need(offered, 1, 3.0)) == [offered]
    other = next(name for name in ("chat@d0", "chat@d1") if name != offered)
    assert town.offers[other] > 0
    assert of(e.LoadModel, town.tell(e.WorkerActivated(4.0, WorkerId(other)))) == [other], "one more, before it is full"


def test_a_second_instance_displaces_no_model_likely_to_be_wanted() -> None:
    """A model is idle between two questions too; reloading it takes longer than they are apart."""
    town = Town(estate("chat", "code", devices=2, resident_bytes=60 * 2**20, dozes=False))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d1")
    town.need("chat@d0", 5, 1.0)
    town.need("code@d1", 5, 100.0)
    town.need("code@d1", 0, 101.0)
    told = {at_s: town.offers["chat@d1"] for at_s in (102, 120, 140, 142) if town.pass_time(float(at_s)) is not None}
    assert [offered > 0 for offered in told.values()] == [False, False, False, True], told


def test_a_device_is_not_given_up_for_a_pause_between_questions() -> None:
    """A model that leaves must be reloaded: it must have been dispensable for longer than that takes."""
    town = Town(estate("chat", "code", devices=2, resident_bytes=60 * 2**20, dozes=False))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d1")
    town.need("chat@d0", 5, 1.0)
    left = []
    for at_s in range(2, 200):
        town.need("code@d1", 5 * (at_s < 120 and at_s % 4 < 2), float(at_s))
        left += [at_s for _ in of(e.UnloadModel, town.pass_time(float(at_s)))]
    assert len(left) == 1
    assert left[0] >= 158, "idle since 118, and a load takes ten seconds"


def test_a_failed_load_is_tried_elsewhere_and_later_here() -> None:
    """One device that cannot load a model does not keep it from being served."""
    landlord = estate("chat", "code", devices=2)
    landlord.handle(e.ModelsMeasured(0.0, {}))
    commands = landlord.handle(e.ModelWanted(0.0, WorkerId("chat@d0")))
    assert of(e.LoadModel, commands) == ["chat@d0"]
    commands += landlord.handle(e.LoadFailed(1.0, WorkerId("chat@d0"), retry_s=30.0))
    offers = {one.worker: one.capacity_bytes for one in commands if isinstance(one, e.OfferCapacity)}
    assert offers["chat@d0"] == 0
    assert offers["chat@d1"] > 0
    landlord.handle(e.ModelsMeasured(30.0, {}))
    assert landlord.instances[WorkerId("chat@d0")].state == "failed"
    landlord.handle(e.ModelsMeasured(32.0, {}))
    assert landlord.instances[WorkerId("chat@d0")].state == "stopped"
    check_landlord(landlord)


def test_weights_larger_than_declared_close_granules() -> None:
    """The ledger follows what a load has measured."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.landlord.handle(e.ModelWanted(0.0, WorkerId("chat@d0")))
    town.tell(e.ModelLoaded(1.0, WorkerId("chat@d0"), resident_bytes=50 * 2**20))
    assert town.offers["chat@d0"] == 50
    check_landlord(town.landlord)


def test_a_worker_is_offered_what_its_own_weights_leave() -> None:
    """No request is placed on memory that weights hold there, though they took less on another device."""
    town = Town(estate("chat", "code", devices=2))
    town.resident_bytes = {"chat@d0": 40 * 2**20, "chat@d1": 30 * 2**20}
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("chat@d1")
    assert (town.offers["chat@d0"], town.offers["chat@d1"]) == (60, 70)
    town.need("chat@d0", town.offers["chat@d0"])
    assert len(town.granules["chat@d0"]) == town.offers["chat@d0"]


def test_a_worker_with_private_kv_memory_may_have_any_block_size() -> None:
    """It shares none, so its blocks need not fit into granules: the models beside it are unaffected."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.landlord.handle(e.ModelWanted(0.0, WorkerId("chat@d0")))
    town.tell(e.ModelLoaded(1.0, WorkerId("chat@d0"), resident_bytes=50 * 2**20, block_bytes=2**19 + 1))
    assert town.offers["chat@d0"] > 0
    town.want("code@d0", 1.0)
    town.need("code@d0", 5, 1.0)
    assert len(town.granules["code@d0"]) == 5


def test_an_impossible_report_is_refused() -> None:
    """A worker that serves cannot have been loaded once more, nor doze unasked; nothing has changed."""
    landlord = estate("chat", "code")
    landlord.handle(e.ModelLoaded(0.0, WorkerId("chat@d0")))
    for report in (e.ModelLoaded(0.0, WorkerId("chat@d0")), e.ModelDozed(0.0, WorkerId("chat@d0"))):
        with pytest.raises(IllegalTransition, match="chat@d0"):
            landlord.handle(report)
        assert landlord.instances[WorkerId("chat@d0")].state == "ready"
    check_landlord(landlord)


def test_commands_name_their_cause() -> None:
    """`melld why` can say what a load was for."""
    landlord = estate("chat", "code")
    landlord.handle(e.ModelsMeasured(0.0, {}))
    commands = landlord.handle(e.ModelWanted(0.0, WorkerId("chat@d0"), id=EventId(7)))
    assert {command.cause for command in commands} == {7}


def test_a_waiting_model_gets_a_place_that_nobody_wants() -> None:
    """The scheduler does not know the worker there: an operator had drained it, and it has come back."""
    town = Town(estate("chat", "code", devices=2))
    loads = [(at_s, of(e.LoadModel, town.pass_time(float(at_s), chat=WAITS))) for at_s in range(11)]
    assert [load for load in loads if load[1]] == [(10, ["chat@d0"])]
