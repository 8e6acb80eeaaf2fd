"""Sorted indexes: after any insertions, moves and removals their order is that of a fresh sort."""

from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.index import Ladder, RoomIndex
from melld.scheduler.state import Request, Worker

CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans(), st.booleans()), max_size=60)


@given(CHANGES, st.booleans())
def test_the_order_is_that_of_a_fresh_sort(changes: list[tuple[int, int, bool, bool]], note_all: bool) -> None:
    """Whatever changed since the last query, the tightest that fits is found."""
    workers = [Worker(f"w{number}", 100, 2, 0, number) for number in range(10)]
    for worker in workers:
        worker.order = worker.rank
    active: dict[str, Worker] = {}
    index = RoomIndex(active, lambda worker: worker.free_bytes)
    request = Request("r", 0, 0, 0)
    for number, used_bytes, awake, full in changes:
        worker = workers[number]
        worker.used_bytes = used_bytes
        worker.requests = {"a": request, "b": request} if full else {}
        worker.count = len(worker.requests)
        active.pop(worker.id, None)
        if awake:
            active[worker.id] = worker
        index.note_all() if note_all else index.note(worker)
        ranked = sorted((w for w in active.values() if w.count < w.slots), key=lambda w: (w.free_bytes, w.order))
        assert [w for w in ranked if w.free_bytes >= 70] == list(index.tightest(70))
        assert ranked[::-1] == list(index.roomiest())


class Thing:
    """Something with an order."""

    def __init__(self, order: int) -> None:
        self.order = order


THINGS = [Thing(order) for order in (1, 2, 3, 4, 5, 1 << 33)]
numbers = st.integers(0, len(THINGS) - 1)
keys = st.integers(-3, 3) | st.integers(0, 1 << 50)


@given(st.lists(st.tuples(numbers, st.none() | keys), max_size=40), keys, keys)
def test_ties_are_ordered_deterministically(changes: list[tuple[int, int | None]], key: int, floor: int) -> None:
    """Of two equal fits every query returns the same one, so that a log can be replayed."""
    ladder: Ladder[Thing] = Ladder()
    held: dict[Thing, int] = {}
    for number, new_key in changes:
        thing = THINGS[number]
        ladder.put(thing, new_key)
        held.pop(thing, None)
        if new_key is not None:
            held[thing] = new_key
    ranked = sorted(held, key=lambda thing: (held[thing], thing.order))
    assert [thing in ladder for thing in THINGS] == [thing in held for thing in THINGS]
    assert len(ladder) == len(held)
    assert (list(ladder.upwards()), list(ladder.downwards())) == (ranked, ranked[::-1])
    assert list(ladder.upwards(floor)) == [thing for thing in ranked if floor <= held[thing]]
    within = [thing for thing in ranked[::-1] if floor <= held[thing] <= key]
    assert list(ladder.downwards(key, floor)) == within
    ladder.refill(held.items())
    assert list(ladder.upwards()) == ranked
    assert list(ladder.downwards(key, floor)) == within
