"""The fleet's KV ledger agrees with the workers' block tables."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule

from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.kvstore.ledger import BlockFacts, Ledger
from tests.effort import examples
from tests.kvstore.laws import check_ledger, kv_bytes, pages

GEOMETRY = KvGeometry(block_tokens=16, block_bytes=1000)
A, B = WorkerId("cpu:0"), WorkerId("cpu:1")
ONE, TWO = RequestId("one"), RequestId("two")


def decoding(blocks: int) -> BlockFacts:
    return blocks, "decoding"


@pytest.fixture
def ledger() -> Ledger:
    book = Ledger()
    book.open_worker(A, GEOMETRY, 100)
    book.open_worker(B, GEOMETRY, 100)
    return book


def test_a_moving_request_counts_on_both_workers(ledger: Ledger) -> None:
    """Memory that a migration takes for a moment is never handed out twice."""
    ledger.blocks_changed(A, (3, 100, 0), {ONE: decoding(3)})
    ledger.blocks_changed(B, (3, 100, 0), {ONE: decoding(3)})
    assert kv_bytes(ledger, ONE) == 6000
    assert None not in (ledger.holding(ONE, A), ledger.holding(ONE, B))
    ledger.blocks_changed(A, (0, 100, 0), {}, [ONE])
    assert kv_bytes(ledger, ONE) == 3000
    assert ledger.holding(ONE, A) is None
    check_ledger(ledger)


def test_a_shared_prefix_is_used_once_and_held_by_each(ledger: Ledger) -> None:
    """Two chats on one system prompt do not make the worker look full, yet each moves at its full size."""
    ledger.blocks_changed(A, (4, 100, 2), {ONE: decoding(3), TWO: decoding(3)})
    check_ledger(ledger)
    sums = ledger.worker(A)
    assert sums is not None
    assert (sums.used_blocks, sums.used_bytes, len(sums.holdings)) == (4, 4000, 2)
    assert kv_bytes(ledger, ONE) == kv_bytes(ledger, TWO) == 3000
    assert ledger.shared_bytes(A, {ONE, TWO}.__contains__) == 2000
    assert ledger.shared_bytes(A, {ONE}.__contains__) == 0, "it alone holds them, as far as is known"


def test_each_growth_is_reported_once(ledger: Ledger) -> None:
    """The scheduler hears of each size once, and of no request that has left since."""
    ledger.blocks_changed(A, (3, 100, 0), {ONE: decoding(3)})
    assert ledger.take_grown() == {(ONE, A): 3000}
    assert ledger.take_grown() == {}
    ledger.blocks_changed(A, (3, 100, 0), {ONE: decoding(3)})
    assert ledger.take_grown() == {}
    ledger.blocks_changed(A, (7, 100, 0), {ONE: decoding(4), TWO: decoding(3)})
    ledger.blocks_changed(A, (4, 100, 0), {}, [TWO])
    assert ledger.take_grown() == {(ONE, A): 4000}
    ledger.blocks_changed(A, (0, 100, 0), {}, [ONE])
    assert ledger.take_grown() == {}


def test_growth_is_reported_once(ledger: Ledger) -> None:
    """The scheduler hears of each growth, and a quiet epoch costs it nothing."""
    ledger.blocks_changed(A, (3, 100, 0), {ONE: decoding(3)})
    ledger.blocks_changed(A, (4, 100, 0), {ONE: decoding(4)})
    assert ledger.take_grown() == {(ONE, A): 4000}
    ledger.blocks_changed(A, (0, 100, 0), {ONE: (0, "waiting")})
    assert ledger.take_grown() == {}, "a preempted request has not grown"
    ledger.blocks_changed(A, (4, 100, 0), {ONE: decoding(4)})
    ledger.blocks_changed(A, (0, 100, 0), {}, [ONE])
    assert ledger.take_grown() == {}, "nor has one that is gone"


def test_a_dead_worker_takes_its_rows_along(ledger: Ledger) -> None:
    """After a crash the requests to be rescued are known, and a new process of that name starts clean."""
    ledger.blocks_changed(A, (6, 100, 0), {ONE: decoding(3), TWO: decoding(3)})
    ledger.reserve(A, RequestId("three"), 2)
    ledger.close_worker(A)
    assert ledger.take_grown() == {}
    ledger.blocks_changed(A, (6, 100, 0), {ONE: decoding(3)})
    assert kv_bytes(ledger, ONE) == 0
    ledger.open_worker(A, GEOMETRY, 50)
    ledger.blocks_changed(A, (1, 50, 0), {ONE: decoding(1)})
    assert kv_bytes(ledger, ONE) == 1000
    check_ledger(ledger)


def test_leaked_blocks_are_detected(ledger: Ledger) -> None:
    """A leak shows as a broken law, not as a worker that slowly fills."""
    ledger.blocks_changed(A, (5, 100, 0), {ONE: decoding(3)})
    with pytest.raises(AssertionError, match="5 blocks used, but 3 held and 0 reserved"):
        check_ledger(ledger)
    ledger.reserve(A, TWO, 2)
    check_ledger(ledger)
    ledger.release(A, TWO)
    ledger.release(A, TWO)
    check_ledger(ledger)  # the worker may have said so before it let go
    ledger.blocks_changed(A, (5, 100, 0), {})
    with pytest.raises(AssertionError):
        check_ledger(ledger)


@pytest.mark.parametrize(
    ("blocks", "facts", "fault"),
    [
        ((101, 100, 0), decoding(101), "101 blocks used of 100"),
        ((2, 100, 1), decoding(3), "one request holds 3"),
    ],
)
def test_impossible_sums_are_detected(
    ledger: Ledger, blocks: tuple[int, int, int], facts: BlockFacts, fault: str
) -> None:
    """A lost message is noticed by the sums, where the numbers alone look harmless."""
    ledger.blocks_changed(A, blocks, {ONE: facts})
    with pytest.raises(AssertionError, match=fault):
        check_ledger(ledger)


class FakePool:
    """One worker's block tables, as vLLM keeps them: reference counts, shared prefixes, and the last report."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.tables: dict[RequestId, list[int]] = {}
        self.told: dict[RequestId, BlockFacts] = {}

    @property
    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def fresh(self, count: int) -> list[int]:
        return sorted(set(range(self.total)) - self.used)[:count]

    def facts(self, request: RequestId) -> BlockFacts:
        table = self.tables[request]
        return len(table), "decoding" if table else "waiting"

    def message(self) -> tuple[tuple[int, int, int], dict[RequestId, BlockFacts], list[RequestId]]:
        now = {request: self.facts(request) for request in self.tables}
        changed = {request: facts for request, facts in now.items() if self.told.get(request) != facts}
        gone = [request for request in self.told if request not in now]
        self.told = now
        named = sum(map(len, self.tables.values()))
        return (len(self.used), self.total, named - len(self.used)), changed, gone


def is_quiet(ledger: Ledger) -> bool:
    """Return True if nothing is held, used or reserved anywhere."""
    return not any(one.holdings or one.used_blocks or one.reserved_blocks for one in pages(ledger))


class LedgerAgainstBlockTables(RuleBasedStateMachine):
    """Two workers with real tables on one side, on the other the ledger that hears of them late."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.pools = {A: FakePool(40), B: FakePool(25)}
        for worker, pool in self.pools.items():
            self.ledger.open_worker(worker, GEOMETRY, pool.total)
        self.mail: list[tuple[WorkerId, tuple]] = []
        self.names = 0

    workers = st.sampled_from([A, B])

    @rule(target=requests, worker=workers, blocks=st.integers(1, 6), data=st.data())
    def arrive(self, worker: WorkerId, blocks: int, data: st.DataObject) -> RequestId:
        pool = self.pools[worker]
        self.names += 1
        request = RequestId(f"r{self.names}")
        neighbours = sorted(pool.tables)
        shared: list[int] = []
        if neighbours and data.draw(st.booleans()):
            shared = pool.tables[data.draw(st.sampled_from(neighbours))][:2]
        pool.tables[request] = shared + pool.fresh(blocks)
        return request

    @rule(request=requests, worker=workers)
    def grow(self, request: RequestId, worker: WorkerId) -> None:
        pool = self.pools[worker]
        if request in pool.tables:
            pool.tables[request] += pool.fresh(1)

    @rule(request=requests, worker=workers)
    def preempt(self, request: RequestId, worker: WorkerId) -> None:
        if request in self.pools[worker].tables:
            self.pools[worker].tables[request] = []

    @rule(request=requests, source=workers)
    def copy_to_the_other(self, request: RequestId, source: WorkerId) -> None:
        here, there = self.pools[source], self.pools[B if source == A else A]
        if request in here.tables and request not in there.tables:
            there.tables[request] = there.fresh(len(here.tables[request]))

    @rule(request=requests, worker=workers)
    def leave(self, request: RequestId, worker: WorkerId) -> None:
        self.pools[worker].tables.pop(request, None)

    @rule(request=consumes(requests))
    def end(self, request: RequestId) -> None:
        for pool in self.pools.values():
            pool.tables.pop(request, None)

    @rule(worker=workers)
    def step(self, worker: WorkerId) -> None:
        self.mail.append((worker, self.pools[worker].message()))

    @precondition(lambda self: self.mail)
    @rule(data=st.data())
    def deliver_the_first_of_one_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted({worker for worker, _ in self.mail})))
        letter = next(letter for letter in self.mail if letter[0] == worker)
        self.mail.remove(letter)
        self._deliver(letter)

    @rule(worker=workers)
    def crash(self, worker: WorkerId) -> None:
        self.pools[worker] = FakePool(self.pools[worker].total)
        self.mail = [letter for letter in self.mail if letter[0] != worker]  # its socket died with it
        self.ledger.open_worker(worker, GEOMETRY, self.pools[worker].total)

    @rule()
    def fall_quiet(self) -> None:
        for worker in (A, B):
            self.mail.append((worker, self.pools[worker].message()))
        for letter in self.mail:
            self._deliver(letter)
        self.mail.clear()
        check_ledger(self.ledger)
        for worker, pool in self.pools.items():
            sums = self.ledger.worker(worker)
            assert sums is not None
            assert (sums.used_blocks, sums.total_blocks) == (len(pool.used), pool.total)
            for who in (set(), set(sorted(pool.tables)[::2]), set(pool.tables)):
                theirs = [pool.tables[request] for request in who]
                saved = sum(map(len, theirs)) - len({block for table in theirs for block in table})
                known = self.ledger.shared_bytes(worker, who.__contains__)
                assert known <= saved * GEOMETRY.block_bytes, "what one frees is given out twice"
                assert len(who) < len(pool.tables) or known == saved * GEOMETRY.block_bytes
            held = {row.request: row for row in self.ledger.holdings_on(worker)}
            assert held.keys() == pool.tables.keys()
            for request, row in held.items():
                assert (row.blocks, row.phase) == pool.facts(request)
                everywhere = sum(len(other.tables.get(request, ())) for other in self.pools.values())
                assert kv_bytes(self.ledger, request) == everywhere * GEOMETRY.block_bytes

    def _deliver(self, letter: tuple[WorkerId, tuple]) -> None:
        worker, (blocks, changed, gone) = letter
        self.ledger.blocks_changed(worker, blocks, changed, gone)

    def teardown(self) -> None:
        for pool in self.pools.values():
            pool.tables.clear()
        self.fall_quiet()
        assert is_quiet(self.ledger)


TestLedgerAgainstBlockTables = LedgerAgainstBlockTables.TestCase
TestLedgerAgainstBlockTables.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_departed_request_leaves_nothing_behind(ledger: Ledger) -> None:
    """A daemon that has served a million requests is no larger for it."""
    ledger.blocks_changed(A, (1, 100, 0), {ONE: decoding(1)})
    ledger.blocks_changed(A, (0, 100, 0), {}, [ONE])
    assert is_quiet(ledger)
    assert [*ledger.take_grown(), *ledger._pages[A].holdings] == []


def test_a_preemption_is_reported_once(ledger: Ledger) -> None:
    """vLLM's own preemptions are counted, so that they can be brought to zero; an end or a move is none."""
    ledger.blocks_changed(A, (6, 100, 0), {ONE: decoding(3), TWO: decoding(3)})
    ledger.blocks_changed(A, (0, 100, 0), {ONE: (0, "waiting")}, [TWO])
    ledger.blocks_changed(B, (0, 100, 0), {TWO: (0, "waiting")})
    assert ledger.take_emptied() == [(ONE, A)]
    assert ledger.take_emptied() == []
