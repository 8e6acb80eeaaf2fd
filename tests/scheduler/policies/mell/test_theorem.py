"""The corrected Theorem 1 and Theorem 3's bound, after every operation on any sizes at the class limits."""

import random
from collections import Counter

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.effort import examples
from tests.scheduler.policies.mell.sizes import CAPACITY, Packing

ITEM_MOVES_PER_OPERATION = 10
SPARE_WORKERS = 12  # asleep before each operation: the theorem speaks of workers enough, however long the run
EDGES = [CAPACITY // parts + off for parts in (2, 3, 4, 8) for off in (-1, 0, 1)]
SIZES = st.one_of(st.sampled_from([*EDGES, CAPACITY]), st.integers(1, CAPACITY // 8), st.integers(1, CAPACITY))


class TheoremMachine(RuleBasedStateMachine):
    """One operation at a time, as in the paper's proof: arrivals, ends, and growth of one request."""

    def __init__(self) -> None:
        super().__init__()
        self.packing = Packing(workers=SPARE_WORKERS)
        self.living: list[str] = []
        self.most = 0

    def count_items(self) -> None:
        plan = self.packing.policy.plan
        self.most = max(self.most, plan.items_moved)
        plan.items_moved = 0

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=6))
    def arrive(self, sizes: list[int]) -> None:
        for size in sizes:
            self.living += self.packing.arrive(size)
            self.check()

    @rule(sizes=st.lists(st.integers(1, CAPACITY // 16), min_size=4, max_size=12))
    def arrive_tiny(self, sizes: list[int]) -> None:
        self.arrive(sizes)

    @rule(data=st.data())
    @precondition(lambda self: self.living)
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.living))
        self.living.remove(name)
        self.packing.finish(name)
        self.check()

    @rule(data=st.data())
    @precondition(lambda self: self.living)
    def grow(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.living))
        old = self.packing.sizes[name]
        steps = [old + 1, old + 40, *(edge for edge in EDGES if old < edge <= 2 * old)]
        self.packing.grow({name: data.draw(st.sampled_from([size for size in steps if size <= CAPACITY] or [old]))})
        self.check()

    def check(self) -> None:
        self.packing.check_theorem()
        self.packing.check_groups()
        self.count_items()
        assert not self.packing.queued, "more workers in one operation than there were to spare"
        self.packing.keep_asleep(SPARE_WORKERS)

    @invariant()
    def few_items_move_per_operation(self) -> None:
        """Check Theorem 3, in items: a group of tiny requests is one item and as many transfers as it has members."""
        assert self.most <= ITEM_MOVES_PER_OPERATION, self.most


TestTheorem = TheoremMachine.TestCase
TestTheorem.settings = hypothesis_settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


def test_a_group_is_one_item_and_as_many_transfers_as_members() -> None:
    """Operators pay for transfers, so the count of moves must not hide them in groups."""
    packing = Packing()
    stay, leave = packing.arrive(3 * CAPACITY // 4, CAPACITY // 4)
    packing.arrive(*[CAPACITY // 50] * 5)
    packing.finish(leave)
    packing.policy.plan.items_moved = 0
    packing.moves.clear()
    packing.grow({stay: CAPACITY - CAPACITY // 50})
    assert packing.policy.plan.items_moved == 1
    assert Counter(move.request for move in packing.moves).total() == 5


def test_the_theorem_holds_for_any_number_of_workers() -> None:
    """A long run of arrivals needs more workers than any fixed number: none waits as long as some sleep."""
    machine = TheoremMachine()
    chance = random.Random(2)
    for _ in range(40):
        machine.arrive([chance.choice([*EDGES, CAPACITY, chance.randint(1, CAPACITY)]) for _ in range(4)])
        machine.few_items_move_per_operation()
    assert len(machine.packing.bins()) > 60
