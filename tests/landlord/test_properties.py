"""The Landlord under any sequence of legal events, audited from messages alone.

The auditor keeps books of its own: who holds which granule, whose weights are on which device, what is promised.
"""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from melld.ids import ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.landlord import Landlord, LandlordSettings
from tests.effort import examples
from tests.landlord.estate import GRANULES, MIB, declare
from tests.landlord.law import check_landlord

MODELS: dict[str, dict[str, object]] = {
    "chat": {"resident_bytes": 30 * MIB, "keep_alive_s": 20.0, "stop_after_s": 30.0},
    "code": {"resident_bytes": 45 * MIB, "block_bytes": MIB // 8, "dozes": False, "keep_alive_s": 40.0},
    "embed": {"resident_bytes": 20 * MIB, "pinned": True},
}
WORKERS = [f"{model}@d{device}" for model in MODELS for device in range(2)]
ON_DEVICE = ("loading", "ready", "leaving", "closing")


class Books:
    """What an outside observer knows of one instance."""

    def __init__(self) -> None:
        self.granules: set[int] = set()
        self.state = "away"
        self.asked = 0
        self.offered = 0
        self.used = 0
        self.drained = False


class LandlordMachine(RuleBasedStateMachine):
    """Drives the Landlord, obeys its commands in any order and time, and audits them."""

    @initialize()
    def begin(self) -> None:
        self.landlord = Landlord(LandlordSettings(swap_after_s=5.0))
        declare(self.landlord, MODELS, devices=2)
        self.books = {name: Books() for name in WORKERS}
        self.now_s = 0.0

    def tell(self, event: e.LandlordEvent) -> None:
        for command in self.landlord.handle(event):
            self.audit(command)

    def audit(self, command: e.LandlordCommand) -> None:
        name, one = command.worker, self.books[command.worker]
        device = name.partition("@")[2]
        there = {other: books for other, books in self.books.items() if other.endswith(device)}
        if isinstance(command, e.OfferCapacity):
            one.offered = command.capacity_bytes // MIB
            assert one.offered <= GRANULES
        elif isinstance(command, e.GrantKv):
            assert one.state == "ready", name
            given = set(command.granules)
            assert given
            assert not any(given & books.granules for books in there.values()), "granted twice"
            one.granules |= given
        elif isinstance(command, e.TakeKv):
            assert not one.asked, "asked again before it has answered"
            assert 0 < command.granules < len(one.granules), "below its floor"
            one.asked = command.granules
        elif isinstance(command, e.LoadModel):
            assert one.state in ("away", "dozing")
            one.state = "loading"
        elif isinstance(command, e.DozeModel | e.UnloadModel):
            assert one.state in ("ready", "dozing")
            assert not one.used, "requests are cut"
            if name.startswith("embed"):
                twin = next(other for other in WORKERS if other.startswith("embed") and other != name)
                assert self.books[twin].state == "ready", "a pinned model has left"
            ends = "closing" if one.state == "ready" else "ending"
            one.state = "leaving" if isinstance(command, e.DozeModel) else ends
        elif isinstance(command, e.StopDozing):
            assert one.state in ("leaving", "closing", "ending")
        elif isinstance(command, e.DrainInstance):
            assert not one.drained
            one.drained = True
        else:
            assert one.drained
            one.drained = False
        self.fits(there)

    def fits(self, there: dict[str, Books]) -> None:
        weights = sum(
            int(MODELS[name.partition("@")[0]]["resident_bytes"])  # type: ignore[call-overload]
            for name, books in there.items()
            if books.state in ON_DEVICE
        )
        granted = sum(len(books.granules) for books in there.values())
        assert weights + (granted + 1) * MIB <= (GRANULES + 1) * MIB, "more than the device has"

    def some(self, *states: str) -> list[str]:
        return [name for name, one in self.books.items() if one.state in states]

    @rule(name=st.sampled_from(WORKERS))
    def wanted(self, name: str) -> None:
        if self.books[name].offered and not self.books[name].drained:
            self.tell(e.ModelWanted(self.now_s, WorkerId(name)))

    @rule(data=st.data())
    def used(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(WORKERS))
        one = self.books[name]
        most = one.used if one.drained else max(one.offered, one.used)
        one.used = data.draw(st.integers(0, most))
        self.tell(e.KvNeeded(self.now_s, WorkerId(name), one.used * MIB, 0, int(one.used > 0)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]), waiting=st.sets(st.sampled_from(sorted(MODELS))))
    def pass_time(self, seconds: float, waiting: set[str]) -> None:
        self.now_s += seconds
        loads = {ModelName(name): e.ModelLoad(arrivals=1, waiting=1, first_bytes=MIB) for name in waiting}
        self.tell(e.ModelsMeasured(self.now_s, loads))

    @rule(name=st.sampled_from([name for name in WORKERS if not name.startswith("embed")]))
    def unload(self, name: str) -> None:
        self.tell(e.UnloadAsked(self.now_s, WorkerId(name)))

    @precondition(lambda self: self.some("loading"))
    @rule(data=st.data(), fails=st.booleans())
    def load(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(self.some("loading")))
        self.books[name].state = "away" if fails else "ready"
        self.tell(e.LoadFailed(self.now_s, WorkerId(name), 3.0) if fails else e.ModelLoaded(self.now_s, WorkerId(name)))

    @precondition(lambda self: self.some("leaving", "closing", "ending"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.some("leaving", "closing", "ending")))
        one = self.books[name]
        dozes = one.state == "leaving"
        one.granules.clear()
        one.asked = 0
        one.state = "dozing" if dozes else "away"
        self.tell(e.ModelDozed(self.now_s, WorkerId(name)) if dozes else e.ModelGone(self.now_s, WorkerId(name)))

    @precondition(lambda self: self.some("ready", "dozing"))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.some("ready", "dozing")))
        one = self.books[name]
        one.granules.clear()
        one.state, one.asked, one.used = "away", 0, 0
        self.tell(e.ModelGone(self.now_s, WorkerId(name)))
        self.tell(e.KvNeeded(self.now_s, WorkerId(name), 0, 0, 0))

    @precondition(lambda self: any(one.asked for one in self.books.values()))
    @rule(data=st.data())
    def answer_take(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, one in self.books.items() if one.asked]))
        one = self.books[name]
        count = data.draw(st.integers(0, one.asked))
        returned = tuple(sorted(one.granules)[:count])
        one.granules -= set(returned)
        one.asked = 0
        self.tell(e.KvReturned(self.now_s, WorkerId(name), returned))

    @precondition(lambda self: any(one.asked for one in self.books.values()))
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, one in self.books.items() if one.asked]))
        self.books[name].asked = 0
        self.tell(e.KvReturned(self.now_s, WorkerId(name), ()))

    @rule(name=st.sampled_from(WORKERS), data=st.data())
    def return_late(self, name: str, data: st.DataObject) -> None:
        """Return after a time-out, or twice: granules are freed once, and others' are never touched."""
        one = self.books[name]
        if one.asked or one.state != "ready":
            return
        returned = set(data.draw(st.lists(st.integers(1, GRANULES), max_size=4)))
        one.granules -= returned
        self.tell(e.KvReturned(self.now_s, WorkerId(name), tuple(returned)))

    @invariant()
    def law_holds(self) -> None:
        if not hasattr(self, "landlord"):
            return
        check_landlord(self.landlord)
        for name, one in self.books.items():
            instance = self.landlord.instances[WorkerId(name)]
            assert instance.house.ledger.granted(instance.id) == len(one.granules), "the ledger and the worker disagree"
            assert instance.taking == one.asked


LandlordMachine.TestCase.settings = hypothesis_settings(
    max_examples=examples(100), stateful_step_count=60, deadline=None
)
TestLandlord = LandlordMachine.TestCase
