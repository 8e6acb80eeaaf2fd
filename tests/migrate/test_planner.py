"""The planner over many epochs: boundaries hold on average, no move starves, and waiting moves name their cause."""

import math
from collections import defaultdict

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.ids import RequestId, WorkerId
from melld.migrate.boundaries import Boundaries, Prefill
from melld.migrate.planner import Planner, PlannerSettings
from melld.migrate.snapshot import Via
from melld.migrate.wish import Cause, Wish
from tests.effort import examples

LINK, COMPUTE, IDLE_COMPUTE = 100, 20, 50
LIMITS = Boundaries(
    epoch_s=0.1, other_link_bytes=LINK, other_prefill=Prefill(IDLE_COMPUTE, COMPUTE), links={}, prefill={}
)
BUSY = {WorkerId(name): 8 for name in ("w0", "w1", "w2")}
KV, TOKENS = (Via.KV,), (Via.TOKENS,)
WAYS = st.sampled_from([(Via.KV, Via.TOKENS), KV, TOKENS])


def wanted(name: str, kv_bytes: int = 10, tokens: int = 5, **rest: object) -> Wish:
    """Return a move from w0 to w1."""
    facts = {"source": WorkerId("w0"), "destination": WorkerId("w1"), **rest}
    return Wish(request=RequestId(name), kv_bytes=kv_bytes, tokens=tokens, **facts)  # type: ignore[arg-type]


def ask(planner: Planner, *moves: Wish) -> None:
    for move in moves:
        planner.ask(move, 0.0)


def resize(planner: Planner, name: str, kv_bytes: int, tokens: int, ways: tuple[Via, ...]) -> None:
    move = planner.waiting[RequestId(name)]
    move.kv_bytes, move.tokens, move.ways = kv_bytes, tokens, ways


def names(starts: tuple[Wish, ...]) -> list[str]:
    return [start.request for start in starts]


def ways(starts: tuple[Wish, ...]) -> dict[str, Via]:
    return {start.request: start.planned for start in starts}


# -- by KV or by tokens ----------------------------------------------------------------------------------------------


def test_what_the_link_cannot_take_goes_by_tokens() -> None:
    """An epoch's moves are spread over both resources before any of them waits."""
    planner = Planner(LIMITS)
    ask(planner, wanted("a", 60, 15), wanted("b", 60, 15), wanted("c", 60, 15))
    plan = planner.epoch(BUSY)
    assert sorted(ways(plan.starts).values()) == [Via.KV, Via.TOKENS]
    (left,) = planner.waiting.values()
    assert (left.waits_for, left.epochs) == (Cause.BOTH, 1)


def test_an_operator_s_choice_and_a_closed_link_are_obeyed() -> None:
    """`--via`, or a link that cannot be opened, leaves one way, even where the other is free."""
    planner = Planner(LIMITS)
    ask(planner, wanted("a", 10, 1, ways=KV), wanted("b", 1, 10, ways=TOKENS))
    assert ways(planner.epoch(BUSY).starts) == {"a": Via.KV, "b": Via.TOKENS}


def test_the_most_urgent_move_goes_first() -> None:
    """The source that overflows first is relieved first, whichever asked first."""
    planner = Planner(LIMITS)
    ask(planner, wanted("calm", 80, ways=KV), wanted("soon", 80, ways=KV, urgency_s=3.0))
    ask(planner, wanted("now", 80, ways=KV, urgency_s=0.05))
    order = [names(planner.epoch(BUSY).starts)]
    for request in ("now", "soon"):
        planner.ended(RequestId(request))
        order.append(names(planner.epoch(BUSY).starts))
    assert order == [["now"], ["soon"], ["calm"]]


def test_other_destinations_do_not_wait() -> None:
    """A worker that is full of others' prefill does not delay moves to other workers."""
    planner = Planner(LIMITS)
    ask(planner, *[wanted(f"r{n}", 10**6, 20, ways=TOKENS) for n in range(3)])
    ask(planner, wanted("elsewhere", 10**6, 20, ways=TOKENS, destination=WorkerId("w2")))
    assert names(planner.epoch(BUSY).starts) == ["r0", "elsewhere"]


def test_a_move_cannot_wait_if_its_source_overflows_soon_or_it_is_old() -> None:
    """Two epochs of warning, or ten of patience; an operator is not kept waiting either."""
    planner = Planner(LIMITS)
    for urgency_s, epochs, asked, pressing in (
        (0.2, 0, False, True),
        (0.21, 9, False, False),
        (math.inf, 10, False, True),
        (math.inf, 0, True, True),
    ):
        move = wanted("a", urgency_s=urgency_s, asked=asked, epochs=epochs)
        assert planner.is_pressing(move) is pressing


def test_a_planner_without_waiting_or_running_moves_is_idle() -> None:
    """Only then need nobody ask how busy the workers are."""
    planner = Planner(LIMITS)
    assert planner.is_idle
    ask(planner, wanted("first"))
    assert not planner.is_idle
    planner.epoch(BUSY)
    assert not planner.is_idle, "under way"
    planner.ended(RequestId("first"))
    ask(planner, wanted("too large", 10 * LINK, ways=KV))
    planner.epoch(BUSY)
    planner.drop(RequestId("too large"))
    assert not planner.is_idle, "it began"
    planner.ended(RequestId("too large"))
    for _ in range(11):
        planner.epoch(BUSY)
    assert planner.is_idle


def test_an_idle_destination_prefills_more() -> None:
    """Where nothing decodes, nothing is disturbed."""
    planner = Planner(LIMITS)
    ask(planner, *[wanted(f"r{n}", 10**6, 20, ways=TOKENS) for n in range(3)])
    assert names(planner.epoch({}).starts) == ["r0", "r1"]


# -- between epochs --------------------------------------------------------------------------------------------------


def test_an_urgent_move_starts_at_once_if_there_is_room() -> None:
    """An operator, or a worker about to overflow, does not wait for the epoch; everything else does."""
    planner = Planner(LIMITS)
    planner.epoch(BUSY)
    ask(planner, wanted("asked", 60, ways=KV, asked=True), wanted("calm", 10, ways=KV))
    ask(planner, wanted("urgent", 30, ways=KV, urgency_s=0.1), wanted("late", 30, ways=KV, urgency_s=0.1))
    begun = {name: planner.at_once(RequestId(name), BUSY) for name in ("asked", "calm", "urgent", "late")}
    assert [name for name, start in begun.items() if start] == ["asked", "urgent"]
    assert {d.request: d.waits_for for d in planner.waiting.values()} == {"calm": Cause.EPOCH, "late": Cause.LINK}


def test_a_move_under_way_still_takes_its_share() -> None:
    """A move over several epochs is not joined by as many more in each of them."""
    planner = Planner(LIMITS)
    ask(planner, wanted("a", 70, ways=KV), wanted("b", 70, ways=KV))
    assert names(planner.epoch(BUSY).starts) == ["a"]
    assert names(planner.epoch(BUSY).starts) == []
    planner.ended(RequestId("a"))
    assert planner.at_once(RequestId("b"), BUSY) is None  # this epoch's part of the link is spent
    assert names(planner.epoch(BUSY).starts) == ["b"]


def test_a_large_move_is_booked_for_as_many_epochs_as_it_needs() -> None:
    """A move above the boundary may begin, as it must at some time; the link's average load stays within it."""
    planner = Planner(LIMITS)
    ask(planner, wanted("large", 250, ways=KV))
    assert names(planner.epoch(BUSY).starts) == ["large"]
    planner.ended(RequestId("large"))
    ask(planner, *[wanted(f"r{n}", 50, ways=KV) for n in range(3)])
    assert [names(planner.epoch(BUSY).starts) for _ in range(3)] == [[], ["r0"], ["r1"]]


# -- nobody is forgotten ---------------------------------------------------------------------------------------------


def test_small_moves_do_not_starve_a_large_one() -> None:
    """Small urgent moves that never leave the link empty must let it pass eventually."""
    patience = PlannerSettings().patience
    planner = Planner(LIMITS)
    ask(planner, wanted("large", 250, ways=KV))
    under_way: list[RequestId] = []
    for epoch in range(patience + 4):
        ask(planner, wanted(f"{epoch}", 40, ways=KV, urgency_s=0.01))
        begun = [start.request for start in planner.epoch(BUSY).starts]
        if epoch == patience:
            assert [d.waits_for for d in planner.waiting.values()][1:] == [Cause.ELDER]
        if "large" in begun:
            assert epoch <= patience + 2
            return
        for request in under_way:  # each takes two epochs
            planner.ended(request)
        under_way = begun
    raise AssertionError("it never began")


def test_a_move_that_has_waited_too_long_is_dropped() -> None:
    """It is outdated: the scheduler hears of it and may decide again."""
    planner = Planner(LIMITS, PlannerSettings(give_up=5))
    ask(planner, wanted("first", 80, ways=KV), wanted("second", 80, ways=KV))
    plans = [planner.epoch(BUSY) for _ in range(7)]  # the first never ends
    assert [[d.request for d in plan.given_up] for plan in plans] == [[]] * 5 + [["second"]] + [[]]
    assert not planner.waiting


def test_moves_of_a_lost_request_or_worker_are_dropped() -> None:
    """No move starts for a lost worker, and the planner returns each dropped move."""
    planner = Planner(LIMITS)
    ask(planner, wanted("ended"), wanted("to"), wanted("from", source=WorkerId("w1"), destination=WorkerId("w2")))
    ask(planner, wanted("stays", destination=WorkerId("w2")))
    assert planner.drop(RequestId("ended")) is not None
    assert planner.drop(RequestId("ended")) is None
    assert [d.request for d in planner.drop_worker(WorkerId("w1"))] == ["to", "from"]
    assert names(planner.epoch(BUSY).starts) == ["stays"]


def test_a_move_is_planned_with_its_current_size() -> None:
    """Requests grow while they wait."""
    planner = Planner(LIMITS)
    ask(planner, wanted("a", 60, ways=KV), wanted("b", 40, ways=KV))
    resize(planner, "b", 41, 5, KV)
    assert names(planner.epoch(BUSY).starts) == ["a"]
    resize(planner, "b", 45, 6, TOKENS)
    (start,) = planner.epoch(BUSY).starts
    assert (start.kv_bytes, start.tokens, start.planned) == (45, 6, Via.TOKENS)


def test_a_move_waits_for_a_destination_that_is_not_ready() -> None:
    """A waking worker gets its requests once it is ready, and other moves are not delayed."""
    planner = Planner(LIMITS)
    ask(planner, wanted("a", 60, ways=()))
    for _ in range(PlannerSettings().patience + 2):
        assert planner.epoch(BUSY).starts == ()
    assert planner.waiting[RequestId("a")].waits_for is Cause.NO_WAY
    ask(planner, wanted("b", 60, ways=KV))
    assert names(planner.epoch(BUSY).starts) == ["b"]
    planner.ended(RequestId("b"))
    resize(planner, "a", 60, 5, KV)
    assert names(planner.epoch(BUSY).starts) == ["a"]


# -- any history -----------------------------------------------------------------------------------------------------

MOVES = st.tuples(
    st.sampled_from([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
    st.integers(1, 260),
    st.integers(1, 70),
    st.sampled_from([math.inf, 5.0, 0.05]),
    WAYS,
    st.booleans(),
)
EPOCHS = st.lists(st.tuples(st.lists(MOVES, max_size=4), st.integers(0, 3)), min_size=1, max_size=30)


class History:
    """Plays epochs and keeps its own book: what began in which bin, and when."""

    def __init__(self, settings: PlannerSettings) -> None:
        self.planner = Planner(LIMITS, settings)
        self.begun: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        self.ends: dict[int, list[RequestId]] = defaultdict(list)
        self.asked: dict[RequestId, int] = {}
        self.started: dict[RequestId, int] = {}
        self.given_up: list[RequestId] = []
        self.epochs = 0

    def epoch(self, moves: list[tuple], lasting: int) -> None:  # type: ignore[type-arg]
        """Play one epoch: what ends now, the plan, then the requests before the next."""
        for request in self.ends.pop(self.epochs, []):
            self.planner.ended(request)
        plan = self.planner.epoch(BUSY)
        self.given_up += [deferred.request for deferred in plan.given_up]
        for start in plan.starts:
            self.note(start, lasting)
        for (source, destination), kv_bytes, tokens, urgency_s, open_ways, asked in moves:
            request = RequestId(f"r{len(self.asked)}")
            self.asked[request] = self.epochs
            self.planner.ask(
                Wish(
                    request=request,
                    source=WorkerId(f"w{source}"),
                    destination=WorkerId(f"w{destination}"),
                    kv_bytes=kv_bytes,
                    tokens=tokens,
                    urgency_s=urgency_s,
                    ways=open_ways,
                    asked=asked,
                ),
                float(self.epochs),
            )
            if (now := self.planner.at_once(request, BUSY)) is not None:
                self.note(now, lasting)
        self.epochs += 1

    def note(self, move: Wish, lasting: int) -> None:
        assert move.planned in move.ways
        assert move.request not in self.started
        self.started[move.request] = self.epochs
        self.ends[self.epochs + 1 + lasting].append(move.request)
        by_kv = move.planned is Via.KV
        name = ("kv", move.source, move.destination) if by_kv else ("tokens", move.destination)
        self.begun[name].append((self.epochs, move.kv_bytes if by_kv else move.tokens))


@given(EPOCHS)
def test_no_boundary_is_exceeded_over_any_run_of_epochs(epochs: list[tuple]) -> None:  # type: ignore[type-arg]
    """Moves begun in n epochs cost at most n boundaries plus the excess of the last large move."""
    history = History(PlannerSettings())
    for moves, lasting in epochs:
        history.epoch(moves, lasting)
    for name, begun in history.begun.items():
        boundary = LINK if name[0] == "kv" else COMPUTE
        for first in {epoch for epoch, _ in begun}:
            for last in {epoch for epoch, _ in begun if epoch >= first}:
                within = [(epoch, cost) for epoch, cost in begun if first <= epoch <= last]
                over = max(within[-1][1] - boundary, 0)
                assert sum(cost for _, cost in within) <= (last - first + 1) * boundary + over


@settings(max_examples=examples(50), deadline=None)
@given(EPOCHS)
def test_every_move_begins_although_others_keep_coming(epochs: list[tuple]) -> None:  # type: ignore[type-arg]
    """No move starves: under constant load behind it, each begins within a known time."""
    history = History(PlannerSettings(patience=3, give_up=10**6))
    moves = [move for moves, _ in epochs for move in moves][:6]
    history.epoch(moves, 1)
    count = len(moves)
    small = ((0, 1), 40, 10, 0.05, (Via.KV, Via.TOKENS), False)
    # Each is kept from its bins by those before it: at most 4 epochs of booking and 2 of flight for each of them.
    for _ in range(3 + 6 * (count + 1)):
        history.epoch([small], 1)
    assert {f"r{index}" for index in range(count)} <= history.started.keys()


@given(EPOCHS)
def test_a_requested_move_begins_waits_or_is_dropped(epochs: list[tuple]) -> None:  # type: ignore[type-arg]
    """The scheduler counts a move on both workers until it hears of it: none may be lost on the way."""
    history = History(PlannerSettings(patience=2, give_up=4))
    for moves, lasting in epochs:
        history.epoch(moves, lasting)
    ends = [set(history.started), set(history.planner.waiting), set(history.given_up)]
    assert sum(map(len, ends)) == len(history.asked)
    assert set().union(*ends) == history.asked.keys()
    waited = [history.epochs - history.asked[request] for request in history.planner.waiting]
    assert max(waited, default=0) <= 6


@given(EPOCHS)
def test_equal_histories_give_equal_plans(epochs: list[tuple]) -> None:  # type: ignore[type-arg]
    """A recorded day can be replayed."""
    books = []
    for _ in range(2):
        history = History(PlannerSettings())
        for moves, lasting in epochs:
            history.epoch(moves, lasting)
        books.append((dict(history.begun), msgspec.to_builtins(list(history.planner.waiting.values()))))
    assert books[0] == books[1]
