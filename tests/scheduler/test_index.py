"""Promises of the index of workers by room."""

from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.index import RoomIndex
from melld.scheduler.state import Request, Worker

CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans(), st.booleans()), max_size=60)


@given(CHANGES, st.booleans())
def test_the_order_is_that_of_a_fresh_sort(changes: list[tuple[int, int, bool, bool]], note_all: bool) -> None:
    """Whatever changed since the last question, the tightest that fits is found."""
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
