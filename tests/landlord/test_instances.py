"""What the Landlord knows of an instance, and how operators and changes of plan affect it."""

import math

import pytest

from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.estimate import ModelDemand, prefill_part
from melld.landlord.instance import Instance
from tests.landlord.estate import GRANULES, MIB, WEIGHTS, Town, estate, of

CHAT, CODE = WorkerId("chat@d0"), WorkerId("code@d0")
LEFT_OF_TWO = GRANULES - 2 * WEIGHTS


def both(**special: object) -> Town:
    """Two models on one device, both loaded and idle."""
    town = Town(estate("chat", "code", **special))
    town.pass_time(0.0)
    town.want(CHAT)
    town.want(CODE)
    return town


def whys(kind: type, commands: list[e.LandlordCommand]) -> list[tuple[str, e.Why]]:
    """Return the instances that commands of this kind are about, each with the reason."""
    return [(command.worker, command.why) for command in commands if type(command) is kind]


def test_an_operator_unloads_a_running_model_after_its_requests_end() -> None:
    """A dozing one goes at once; both for the operator's reason, who wants the process gone."""
    town = both(keep_alive_s=60.0)
    town.need(CHAT, 3, 1.0)
    commands = town.tell(e.UnloadAsked(2.0, CHAT))
    assert whys(e.DrainInstance, commands) == [(CHAT, e.Why.OPERATOR)]
    assert of(e.UnloadModel, commands) == []
    assert whys(e.UnloadModel, town.need(CHAT, 0, 3.0)) == [(CHAT, e.Why.OPERATOR)]
    assert of(e.DozeModel, town.pass_time(64.0)) == [CODE]
    assert whys(e.UnloadModel, town.tell(e.UnloadAsked(65.0, CODE))) == [(CODE, e.Why.OPERATOR)]


def dozing(keeps: int) -> Town:
    """Chat dozes, and its process keeps this many granules of memory."""
    town = both(keep_alive_s=60.0)
    town.need(CODE, 1, 30.0)
    town.dozing_bytes = keeps * MIB
    assert of(e.DozeModel, town.pass_time(61.0)) == [CHAT]
    return town


def test_memory_kept_by_a_dozing_process_is_accounted_for() -> None:
    """It is in the ledger, yet offered to others: the process ends as soon as they need it."""
    town = dozing(keeps=6)
    ledger = town.landlord.instances[CHAT].house.ledger
    assert ledger.resident(CHAT) == 6 * MIB
    assert ledger.limit == GRANULES - WEIGHTS - 6
    assert town.offers[CODE] == GRANULES - WEIGHTS
    assert of(e.UnloadModel, town.need(CODE, GRANULES - WEIGHTS - 6, 62.0)) == []
    assert whys(e.UnloadModel, town.need(CODE, GRANULES - WEIGHTS - 5, 63.0)) == [(CHAT, e.Why.EVICTED)]
    assert len(town.granules[CODE]) == GRANULES - WEIGHTS - 5


def test_loading_weights_end_a_dozing_process_only_for_lack_of_room() -> None:
    """A waking model ends no other while all fit, and ends one where they do not."""
    town = dozing(keeps=12)
    commands = town.want(CHAT, 62.0)
    assert of(e.LoadModel, commands) == [CHAT]
    assert town.landlord.instances[CHAT].house.ledger.resident(CHAT) == WEIGHTS * MIB
    town = Town(estate("chat", "code", "third", keep_alive_s=60.0))
    town.pass_time(0.0)
    town.dozing_bytes = 15 * MIB
    for number, model in enumerate(("chat", "code")):
        town.want(f"{model}@d0", 61.0 * number)
        assert of(e.DozeModel, town.pass_time(61.0 * (number + 1))) == [f"{model}@d0"]
    assert of(e.UnloadModel, town.want("third@d0", 123.0)) == []
    assert of(e.UnloadModel, town.need("third@d0", 41, 124.0)) == ["chat@d0"], "it dozed the longest"


def test_a_model_that_would_keep_most_of_its_memory_does_not_doze() -> None:
    """A small model's process is most of what it has: ending it frees more, and costs little."""
    for keeps, leaves in ((WEIGHTS // 2, e.DozeModel), (WEIGHTS // 2 + 1, e.UnloadModel)):
        town = both(keep_alive_s=60.0, dozing_bytes=keeps * MIB)
        assert of(leaves, town.pass_time(61.0)) == [CHAT, CODE]


@pytest.mark.parametrize("how", ["a request", "requests that wait"])
def test_an_instance_wanted_again_during_its_consolidation_stays(how: str) -> None:
    """Its requests need not move, and its weights need not be read again."""
    town = Town(estate("chat", "code", devices=2))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d1")
    town.need("chat@d0", 5, 1.0)
    town.need("code@d1", 2, 1.0)
    drained = [whys(e.DrainInstance, town.pass_time(float(at_s))) for at_s in range(5, 100, 5)]
    assert [one for one in drained if one] == [[("code@d1", e.Why.FEWER)]]
    waits = e.ModelLoad(arrivals=1, waiting=1, first_bytes=1)
    commands = town.want("code@d1", 100.0) if how == "a request" else town.pass_time(100.0, code=waits)
    assert whys(e.ReopenInstance, commands) == [("code@d1", e.Why.WANTED)]
    assert town.landlord.instances[WorkerId("code@d1")].state == "ready"


def test_no_second_model_leaves_while_the_first_one_s_memory_is_coming() -> None:
    """It would need a full load for its next call, and nobody gains by it."""
    landlord = estate("old", "other", "new", dozes=False, resident_bytes=45 * MIB)
    for model in ("old", "other"):
        landlord.handle(e.ModelWanted(0.0, WorkerId(f"{model}@d0")))
        landlord.handle(e.ModelLoaded(0.0, WorkerId(f"{model}@d0")))
    waits = {ModelName("new"): e.ModelLoad(waiting=1, first_bytes=MIB)}
    told = [one for at_s in range(100, 120) for one in landlord.handle(e.ModelsMeasured(float(at_s), waits))]
    assert of(e.UnloadModel, told) == ["old@d0"]


def test_no_model_leaves_for_calls_that_wait_for_a_front_end() -> None:
    """They waited for the load, too, and lack no memory."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want(CODE)
    for at_s in range(100, 112):
        town.pass_time(float(at_s), chat=e.ModelLoad(waiting=1))
    assert of(e.LoadModel, town.told) == [CODE, CHAT]
    assert of(e.DrainInstance, town.told) == []


def test_unneeded_granules_are_offered_unless_they_cannot_be_returned() -> None:
    """A worker that did not answer keeps its granules until it is asked again."""
    town = both()
    town.need(CHAT, LEFT_OF_TWO - 1, 1.0)
    town.need(CHAT, 0, 2.0)
    assert town.offers[CODE] == LEFT_OF_TWO - 1
    town.answers_takes = False
    town.need(CODE, 5, 3.0)
    town.tell(e.KvReturned(5.0, CHAT, ()))
    assert town.offers[CODE] <= 5


def test_a_take_takes_only_part_of_the_surplus() -> None:
    """Whoever lacks one granule now will lack another soon, and each take costs the giver a step."""
    town = both()
    town.need(CHAT, LEFT_OF_TWO - 1)
    town.need(CHAT, 0)
    town.need(CODE, 2)
    assert len(town.granules[CHAT]) == LEFT_OF_TWO - 1 - 38 // 8


def test_mean_use_and_idle_time_are_remembered() -> None:
    """Memory is shared by the mean; idleness counts from the last request's end, not from the last report."""
    instance: Instance = estate("chat").instances[CHAT]
    instance.note_use(10 * MIB, 0, 1, 5.0)
    assert (instance.mean_bytes, instance.idle_since_s) == (0.0, 0.0)
    instance.note_use(20 * MIB, 0, 2, 1e9)
    assert (instance.mean_bytes, instance.idle_since_s) == (10 * MIB, 0.0)
    instance.note_use(0, 0, 0, 1e9)
    assert (instance.mean_bytes, instance.idle_since_s) == (10 * MIB, 1e9)
    instance.note_use(0, 0, 0, 2e9)
    assert instance.idle_since_s == 1e9


@pytest.mark.parametrize(
    ("first_granules", "leaves"), [(1, False), (LEFT_OF_TWO - 1, False), (LEFT_OF_TWO, True), (71, None)]
)
def test_a_model_is_loaded_where_its_first_request_fits_too(first_granules: int, leaves: bool | None) -> None:
    """To the last granule; models that must leave for it leave, and where it can never fit none does."""
    town = Town(estate("chat", "code"))
    town.pass_time(0.0)
    town.want(CHAT)
    model = town.landlord.instances[CODE].model
    model.first_bytes = first_granules * MIB
    choice = town.landlord.placement.choose(model, 30.0)
    assert (None if choice is None else [one.id for one in choice.victims]) == (
        None if leaves is None else [CHAT] * leaves
    )


@pytest.mark.parametrize(("used", "is_given_up"), [(30, True), (60, False)])
def test_a_device_is_given_up_only_if_the_others_hold_its_requests(used: int, is_given_up: bool) -> None:
    """Unused models beside them just leave."""
    town = Town(estate("chat", "code", "draw", devices=2))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.want("code@d1")
    town.want("draw@d1")
    town.need("chat@d0", used, 1.0)
    town.need("code@d1", 2, 1.0)
    told = [town.pass_time(float(at_s)) for at_s in range(5, 100, 5)]
    loads = [name for commands in told for name in of(e.LoadModel, commands)]
    drains = [name for commands in told for name in of(e.DrainInstance, commands)]
    assert (loads, "code@d1" in drains, "draw@d1" in drains) == (
        (["code@d0"], True, True) if is_given_up else ([], False, False)
    )


def test_a_prior_fades_as_data_comes_in() -> None:
    """16 ended requests weigh e - 1 times as much as the first guess; prompts take no time before any has come."""
    demand = ModelDemand()
    assert prefill_part([demand]) == 0.0
    demand.observe(e.ModelLoad(ended=16, output_tokens=16 * 300, prompts=16, prefill_s=16 * 0.2, step_s=0.04), 5.0)
    known = 1 - math.exp(-1)
    assert demand.output_tokens == pytest.approx(200 + known * 100)
    assert demand.prefill_s == pytest.approx(0.1 + known * 0.1)
    assert demand.step_s == pytest.approx(0.02 + known * 0.02)


def test_a_model_that_is_wanted_while_going_to_doze_turns_round() -> None:
    """Its request waits as long as waking takes, not dozing; what it still held is no measure of a doze."""
    town = both(keep_alive_s=60.0)
    town.dozes_at_once = False
    assert of(e.DozeModel, town.pass_time(64.0)) == [CHAT, CODE]
    assert of(e.StopDozing, town.pass_time(65.0)) == []
    asked = town.pass_time(65.25, chat=e.ModelLoad(waiting=1, first_bytes=MIB))
    assert whys(e.StopDozing, asked) == [(CHAT, e.Why.WANTED)]
    town.tell(e.ModelDozed(65.5, CHAT, WEIGHTS * MIB))
    assert town.offers[CHAT] > 0
    assert of(e.LoadModel, town.need(CHAT, 1, 65.5)) == [CHAT]
    assert town.landlord.models[ModelName("chat")].dozes


def test_a_model_can_be_added_changed_and_removed() -> None:
    """Its memory goes to the others; a namesake may come later; changed settings apply."""
    town = both()
    town.tell(e.UnloadAsked(1.0, CHAT))
    town.tell(e.ModelRemoved(2.0, ModelName("chat")))
    assert town.offers[CODE] == GRANULES - WEIGHTS
    assert list(town.landlord.instances) == [CODE]
    facts = {"resident_bytes": WEIGHTS * MIB, "block_bytes": MIB // 8, "load_s": 10.0}
    town.tell(e.ModelDeclared(3.0, ModelName("chat"), **facts))  # type: ignore[arg-type]
    town.tell(e.InstanceDeclared(3.0, WorkerId("w9"), ModelName("chat"), DeviceName("d0")))
    town.pass_time(3.0)
    assert of(e.LoadModel, town.want("w9", 3.0)) == ["w9"]
    town.tell(e.ModelDeclared(4.0, ModelName("code"), pinned=True, **facts))  # type: ignore[arg-type]
    assert of(e.DozeModel, town.pass_time(1e6)) == ["w9"]
