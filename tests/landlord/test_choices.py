"""Where a model is loaded, and what the estimator says of models that share a device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.ids import ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.estimate import ModelDemand, served_per_s, token_s
from melld.landlord.granules import GRANULE_UNIT_BYTES, granule_bytes_for
from melld.landlord.landlord import Landlord
from melld.landlord.placement import LandlordSettings
from tests.landlord.estate import MIB, Town, declare, estate, of

BUSY = e.ModelLoad(arrivals=40, ended=40, output_tokens=40 * 300, held_bytes=40 * MIB, prompts=40, prefill_s=0.4)
LARGE = e.ModelLoad(waiting=1, first_bytes=45 * MIB)
CHAT, CODE = ModelName("chat"), ModelName("code")


def demand() -> ModelDemand:
    found = ModelDemand()
    for _ in range(60):
        found.observe(e.ModelLoad(10, 10, 3000, 10 * MIB, 10, 0.5, step_s=0.02), 10.0)
    return found


def test_step_times_of_models_on_one_device_add_up() -> None:
    """A token of one model waits for the steps of the others."""
    chat, code = demand(), demand()
    assert token_s([chat]) == pytest.approx(0.02, rel=0.05)
    assert token_s([chat, code]) == pytest.approx(0.04, rel=0.05)


def test_requests_without_memory_count_as_unserved() -> None:
    """F is the arrivals where memory is plenty, and falls with the memory where it is short."""
    chat, code = demand(), demand()
    plenty = served_per_s([chat, code], 10**12)
    assert plenty == pytest.approx(2.0, rel=0.05)
    assert served_per_s([chat, code], 4 * MIB) < plenty / 2
    assert served_per_s([chat], 0) == 0.0


def test_a_model_prefers_a_device_that_is_awake() -> None:
    """The fewest devices are awake; a sleeping one is woken when weights fit nowhere else."""
    town = Town(estate("chat", "code", "draw", "embed", devices=2))
    town.pass_time(0.0)
    town.want("chat@d0")
    assert (town.offers["code@d0"] > 0, town.offers["code@d1"]) == (True, 0)
    town.want("code@d0")
    town.want("draw@d0")
    town.need("chat@d0", 1, 1.0)
    town.need("code@d0", 1, 1.0)
    town.need("draw@d0", 1, 1.0)
    town.pass_time(2.0)
    assert (town.offers["embed@d0"], town.offers["embed@d1"] > 0) == (0, True)


def test_a_device_with_slow_steps_takes_no_more_models() -> None:
    """Packing by bytes alone would ruin everybody's latency."""
    settings = LandlordSettings(itl_target_s=0.03)
    town = Town(estate("chat", "code", devices=2, settings=settings, resident_bytes=10 * MIB))
    town.pass_time(0.0)
    town.want("chat@d0")
    town.need("chat@d0", 5, 0.5)
    for second in range(1, 40):
        town.pass_time(float(second), chat=BUSY, code=BUSY)
    assert (town.offers["code@d0"], town.offers["code@d1"] > 0) == (0, True)


def test_a_freshly_loaded_model_stays() -> None:
    """Models are not swapped faster than they can be loaded."""
    town = Town(estate("chat", "code", resident_bytes=60 * MIB))
    town.pass_time(0.0)
    town.landlord.handle(e.ModelWanted(0.0, WorkerId("chat@d0")))
    town.tell(e.ModelLoaded(10.0, WorkerId("chat@d0")))
    town.offers.clear()
    town.pass_time(29.0)
    assert "code@d0" not in town.offers, "nothing was offered since its load began"
    town.pass_time(30.0)
    assert town.offers["code@d0"] > 0
    assert of(e.DozeModel, town.want("code@d0", 30.0)) == ["chat@d0"]


def two_pinned() -> Town:
    """A pinned model on both devices, and one that will doze on the second and so would rather return there."""
    landlord = Landlord()
    declare(landlord, {"embed": {"pinned": True}, "code": {}, "draw": {"keep_alive_s": 5.0}}, devices=2)
    town = Town(landlord)
    for worker in ("draw@d1", "embed@d0", "embed@d1"):
        town.want(worker)
    return town


def test_a_pinned_model_keeps_only_its_last_instance_pinned() -> None:
    """What fits beside neither of two would wait forever.  Once one has left, nobody is offered the other's memory."""
    town = two_pinned()
    town.pass_time(6.0)
    town.pass_time(7.0, code=LARGE, draw=LARGE)
    assert min(town.offers["code@d0"], town.offers["draw@d1"]) >= 45
    commands = town.landlord.handle(e.KvNeeded(7.0, WorkerId("code@d0"), 45 * MIB, 0, 1))
    assert of(e.DozeModel, commands) == ["embed@d0"]
    offers = {one.worker: one.capacity_bytes for one in commands if isinstance(one, e.OfferCapacity)}
    assert offers[WorkerId("draw@d1")] == 0


def test_two_models_loading_at_once_do_not_both_displace_a_pinned_one() -> None:
    """One of them waits, and the pinned model goes on."""
    town = two_pinned()
    town.landlord.handle(e.ModelsMeasured(6.0, {}))
    town.landlord.handle(e.KvNeeded(6.0, WorkerId("draw@d1"), 45 * MIB, 0, 1))  # it comes while `draw` leaves
    town.pass_time(7.0, code=LARGE)
    town.pass_time(16.9, code=LARGE, draw=LARGE)
    town.landlord.handle(e.ModelDozed(16.9, WorkerId("draw@d1")))
    commands = town.landlord.handle(e.ModelsMeasured(17.0, {CODE: LARGE, ModelName("draw"): LARGE}))
    assert of(e.DozeModel, commands) == ["embed@d0"]


@given(st.lists(st.integers(1, 2**26), min_size=1))
def test_a_granule_holds_eight_of_the_largest_blocks(blocks: list[int]) -> None:
    """In whole units of the memory that can be taken from a device."""
    granule = granule_bytes_for(blocks)
    assert granule >= 8 * max(blocks)
    assert granule % GRANULE_UNIT_BYTES == 0
    assert granule - 8 * max(blocks) < GRANULE_UNIT_BYTES
