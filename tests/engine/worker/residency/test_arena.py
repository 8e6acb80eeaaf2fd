"""Engines that share a device's memory: granules come and go without any effect on answers."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from melld.engine.fleet.arena import Arena
from melld.ids import WorkerId
from melld.landlord.granules import GranuleLedger
from melld.migrate.snapshot import CopyPlan
from tests.effort import is_long
from tests.engine.worker.residency.driver import Answer, WorkerFailed, WorkerProxy
from tests.engine.worker.residency.pair import Case, Pair, Running
from tests.engine.worker.residency.test_residency import CASES, GREEDY, LONG_PROMPT, PENALTIES, PROMPT, SAMPLED, SEEDED
from tests.landlord.law import check_ledger

GRANULE_BYTES = 4 << 20
ARENA_BYTES = 17 * GRANULE_BYTES + (1 << 20)
ZEROS, FOUND = bytes(GRANULE_BYTES), bytearray(GRANULE_BYTES)
SHARED = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}


@dataclass
class Device:
    """An arena, its ledger, and the workers that it is lent to."""

    arena: Arena
    ledger: GranuleLedger = field(default_factory=lambda: GranuleLedger(ARENA_BYTES, GRANULE_BYTES))
    held: dict[WorkerProxy, set[int]] = field(default_factory=dict)

    def grant(self, worker: WorkerProxy, count: int) -> None:
        granules = self.ledger.grant(_name(worker), min(count, self.ledger.free))
        self.check_zero(granules)
        worker("grant", list(granules))

    def give_back(self, worker: WorkerProxy) -> list[Any]:
        """Note what the worker has returned by now."""
        answers = worker("returned")
        for answer in answers:
            self.check_zero(answer.granules)
            assert self.ledger.give_back(_name(worker), answer.granules) == len(answer.granules)
        check_ledger(self.ledger)
        return list(answers)

    def check_zero(self, granules: tuple[int, ...]) -> None:
        """Read the file, which backs nothing with memory."""
        file = os.open(self.arena.spec().path, os.O_RDONLY)
        for granule in granules:
            assert os.preadv(file, [FOUND], granule * GRANULE_BYTES) == GRANULE_BYTES
            assert FOUND == ZEROS, granule
        os.close(file)

    def settle(self, worker: WorkerProxy, granted: int) -> None:
        """Give the idle worker exactly this many granules."""
        worker("take", self.ledger.granted(_name(worker)), 0.0)
        worker("step", 3)
        self.give_back(worker)
        assert self.ledger.granted(_name(worker)) == 0
        self.grant(worker, granted)
        assert self.ledger.granted(_name(worker)) == granted


def _name(worker: WorkerProxy) -> WorkerId:
    return WorkerId(str(id(worker)))


@dataclass
class House:
    """Two engines with blocks of two sizes on one device, and a third on another."""

    near: Device
    far: Device
    small: WorkerProxy
    large: WorkerProxy
    away: WorkerProxy
    model: Path
    said: dict[Case, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pair = Pair(self.small, self.large)
        self.across = Pair(self.small, self.away)

    def in_quiet(self, pair: Pair, case: Case) -> Answer:
        """Return the large-block engine's answers while nothing happens."""
        if case not in self.said:
            [self.said[case]] = pair.finish(pair.start(case, self.large))
        return self.said[case]

    def start(self, **options: Any) -> WorkerProxy:
        worker = begin(self.model, self.near.arena, **options)
        worker.receive()
        return worker


def begin(model: Path, arena: Arena, **options: Any) -> WorkerProxy:
    return WorkerProxy(str(model), {"arena": msgspec.to_builtins(arena.spec())} | options)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["ahead", "plain"])
def house(demo_model: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    """A house where the small-block engines schedule ahead and the other does not, or the reverse."""
    near, far = (Device(Arena(ARENA_BYTES, GRANULE_BYTES)) for _ in range(2))
    ahead = request.param
    workers = [
        begin(demo_model, near.arena, async_scheduling=ahead),
        begin(demo_model, near.arena, async_scheduling=not ahead, block_size=96),
        begin(demo_model, far.arena, async_scheduling=ahead),
    ]
    try:
        for worker in workers:
            worker.receive()
        yield House(near, far, *workers, demo_model)
    finally:
        for worker in workers:
            worker.close()
        near.arena.close()
        far.arena.close()


@pytest.fixture
def pair(house: House) -> Iterator[Pair]:
    """Both engines of the near device, idle with half of it each; idle again when the test is over."""
    for worker in (house.small, house.large):
        house.near.settle(worker, 0)
    for worker in (house.small, house.large):
        house.near.settle(worker, 8)
    with house.pair.emptied():
        yield house.pair
    for worker in (house.small, house.large):
        worker("check_pool")


class Bustle:
    """Requests on a pair's two engines, each with its answer from a quiet run."""

    def __init__(self, pair: Pair, cases: list[Case]) -> None:
        self.pair = pair
        self.cases = [(case, worker) for case in cases for worker in (pair.here, pair.there)]
        quiet = [pair.start(case, worker) for case, worker in self.cases]
        self.quiet = dict(zip(self.cases, pair.finish(*quiet), strict=True))
        self.running: list[Running] = []

    def keep_up(self, count: int, chance: random.Random) -> None:
        """Start requests until this many run; half of them begin like others and share their blocks."""
        under_way = sum(one.answer.finish is None for one in self.running)
        for _ in range(under_way, count):
            case, worker = chance.choice(self.cases)
            self.running.append(self.pair.start(case, worker, salt=chance.choice(("shared", None))))

    def check(self) -> None:
        """Step to the end, and compare."""
        said = self.pair.finish(*self.running)
        for one, answer in zip(self.running, said, strict=True):
            expected = self.quiet[one.case, one.home]
            assert answer.tokens == expected.tokens, one.case.name
            assert answer.finish == expected.finish


def test_an_engine_in_an_arena_answers_as_in_private_memory(pair: Pair, plain_pair: Pair) -> None:
    """Where a model's KV lies, and in which order its layers do, changes no token and no log-probability."""
    assert plain_pair.all_unmoved(CASES) == pair.all_unmoved(CASES)


def test_without_a_grant_requests_wait_but_the_trial_token_works(house: House, pair: Pair) -> None:
    """A worker proves that it works before it gets memory; requests that come meanwhile are kept."""
    expected = pair.unmoved(GREEDY)
    house.near.settle(house.small, 0)
    assert len(house.small("use_scratch", "first", list(PROMPT))) == 3
    house.small("check_pool")
    running = pair.start(GREEDY)
    pair.step(5)
    assert running.answer.tokens == []
    house.near.grant(house.small, 2)
    assert pair.finish(running) == [expected]


def test_testing_a_link_overwrites_nothing_that_a_token_depends_on(house: House) -> None:
    """A sibling may come up as this worker begins to doze: the token that it notes must be the one it wakes to."""
    house.near.settle(house.small, 0)
    assert not house.small("writes_to_trials", "noted", list(PROMPT[:4]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_granules_pass_both_ways_under_load_without_changing_answers(house: House, pair: Pair, seed: int) -> None:
    """Two models, sometimes so short of memory that vLLM preempts: every answer is that of a quiet run."""
    chance = random.Random(seed)
    device, workers = house.near, (house.small, house.large)
    lengths = [Case(f"long {tokens}", LONG_PROMPT[:tokens], SEEDED | PENALTIES) for tokens in (150, 320, 500)]
    preemptions = pair.preemptions
    load = Bustle(pair, [*CASES[:7], *lengths, Case("shared", LONG_PROMPT[:200], SHARED)])
    for worker in workers:
        device.settle(worker, 3)
    moved = taken = 0
    for _ in range(40 if is_long() else 18):
        load.keep_up(12, chance)
        pair.step(chance.randint(0, 9))
        giver, getter = chance.sample(workers, 2)
        number = giver("take", chance.randint(1, 2), chance.choice((0.0, 60.0)))
        answers: list[Any] = []
        while not any(answer.take == number for answer in answers):
            pair.step()
            answers += device.give_back(giver)
        moved += sum(answer.moved_blocks for answer in answers)
        taken += sum(len(answer.granules) for answer in answers)
        for worker in workers:
            worker("check_pool")
        lent = sum(device.ledger.granted(_name(worker)) for worker in workers)
        device.grant(getter, chance.randint(0, 7 - lent))
    for worker in workers:
        device.grant(worker, device.ledger.free // 2)
    load.check()
    assert taken > 6
    assert moved > 6
    assert pair.preemptions > preemptions


def test_live_blocks_move_when_there_is_room_and_no_request_waits(house: House, pair: Pair) -> None:
    """Granules come back from a busy engine after its step; its requests neither wait nor lose a block."""
    cases = [GREEDY, SAMPLED, Case("long", LONG_PROMPT[:400], SEEDED)]
    expected = pair.all_unmoved(cases)
    running, preemptions = [pair.start(case) for case in cases], pair.preemptions
    pair.step(8)
    before = house.small("report")
    house.small("take", 7, 60.0)
    pair.step(2)
    [answer] = house.near.give_back(house.small)
    assert len(answer.granules) == 7
    assert answer.moved_blocks > 0
    after = house.small("report")
    assert after.total_blocks == 32 == before.total_blocks // 8
    assert before.used_blocks <= after.used_blocks <= 32
    assert house.small("blocks_in_tables") <= house.small("usable_blocks")
    assert pair.finish(*running) == expected
    assert pair.preemptions == preemptions


def test_a_take_without_room_preempts_the_youngest_at_its_deadline(house: House, pair: Pair) -> None:
    """Memory that another model needs more comes in time, and the preempted request's answer is unchanged."""
    house.near.settle(house.small, 2)
    old = Case("old", LONG_PROMPT[:600], SEEDED)
    young = Case("young", tuple(reversed(LONG_PROMPT[:600])), SEEDED)
    expected = pair.all_unmoved([old, young])
    running = [pair.start(case) for case in (old, young)]
    pair.step(6)
    house.small("take", 1, 3600.0)
    pair.step(3)
    assert house.near.give_back(house.small) == []
    house.small("take", 1, 0.0)
    pair.step(2)
    assert [len(answer.granules) for answer in house.near.give_back(house.small)] == [1]
    assert house.small("state")["running"] == [running[0].request_id]
    assert pair.finish(running[0]) == expected[:1]
    house.near.grant(house.small, 2)
    assert pair.finish(running[1]) == expected[1:]
    assert [len(answer.granules) for answer in house.near.give_back(house.small)] == [1], "there is room for the other"


def test_blocks_of_arriving_or_leaving_requests_stay_in_place(house: House, pair: Pair) -> None:
    """Another worker is about to write or read them by their numbers."""
    expected = pair.unmoved(GREEDY)
    running = pair.start(GREEDY)
    pair.step(5)
    name = running.request_id
    house.small("freeze", name, "kv")
    pair.step()
    assert house.small("stillness", name) == "settled"
    frozen = house.small("blocks_in_tables")
    house.small("take", 8, 0.0)
    house.small("step", 2)
    [answer] = house.near.give_back(house.small)
    assert len(answer.granules) == 7
    assert house.small("blocks_in_tables") == frozen
    house.small("thaw", name)
    house.near.grant(house.small, 7)
    assert pair.finish(running) == [expected]


class Mover:
    """Moves requests between two devices, each with its arena."""

    def __init__(self, house: House) -> None:
        for worker in (house.small, house.large):
            house.near.settle(worker, 0)
        house.near.settle(house.small, 16)
        house.far.settle(house.away, 16)
        self.house = house
        self.pair = house.across

    def shuffle(self, chance: random.Random) -> int:
        """Take granules from both and give them back; return how many live blocks that moved."""
        moved = 0
        for device, worker in ((self.house.near, self.house.small), (self.house.far, self.house.away)):
            worker("take", chance.randint(9, 14), 0.0)
            self.pair.step()
            moved += sum(answer.moved_blocks for answer in device.give_back(worker))
            device.grant(worker, 16)
            worker("check_pool")
        return moved


def test_requests_move_between_devices_while_granules_are_taken(house: House) -> None:
    """A request's copy is never confused with its blocks' new places."""
    mover, chance = Mover(house), random.Random(3)
    pair = mover.pair
    expected = pair.all_unmoved(CASES)
    running = [pair.start(case) for case in CASES]
    pair.step(3)
    moved = 0
    for number, one in enumerate(running * 3):
        moved += mover.shuffle(chance)
        if one.answer.finish is None:
            pair.move(one, "tokens" if number % 4 == 3 else "kv", decode_meanwhile=chance.randint(0, 2))
    assert pair.finish(*running) == expected
    assert moved > 5
    pair.assert_idle()


def test_a_block_that_moved_after_it_was_copied_is_copied_again(house: House) -> None:
    """The copy may have read the block after it was scrubbed."""
    pair = Mover(house).pair
    case = Case("long and greedy", LONG_PROMPT, SHARED)
    expected, running = pair.unmoved(case), pair.start(case)
    pair.step(6)
    name = running.request_id
    reservation = house.away("reserve", *house.small("core_request", name), 0)
    before = house.small("facts", name)
    house.small("take", 15, 0.0)
    house.small("step", 0)
    while not (answers := house.near.give_back(house.small)):
        pair.step()
    assert answers[0].moved_blocks > 0
    plan = CopyPlan(reservation)
    blocks, into, places = plan.missing(before.full_block_ids, before.block_epoch, reservation)
    house.away("pull", house.small("handle"), blocks, into)  # zeros
    plan.copied(places, before.block_epoch)
    assert house.small("facts", name).block_epoch > before.block_epoch
    pair.complete(running, plan)
    assert pair.finish(running) == [expected]
    pair.assert_idle()


def test_a_link_touches_no_sibling_memory_that_it_does_not_copy(house: House) -> None:
    """Reading untouched memory would back it with zeros, and fill the device."""
    pair = Mover(house).pair
    house.near.settle(house.small, 0)
    before = house.near.arena.resident_bytes
    assert before <= GRANULE_BYTES, "only granule 0 is nobody's"
    house.near.grant(house.small, 16)
    running = pair.start(GREEDY)
    pair.step(4)
    pair.move(running)
    pair.finish(running)
    assert house.near.arena.resident_bytes <= before + 6 * house.small("block_bytes")
    pair.assert_idle()


STEPS = ["half moved", "half scrubbed"]
STEPS += [pytest.param(one, marks=pytest.mark.long) for one in ("asked", "withheld", "moved", "scrubbed")]


def killed_while_taking(house: House, pair: Pair, victim: Any, point: str) -> tuple[list[Any], list[Any]]:
    """What runs beside a worker that is killed at this point of a take, and its expected answers."""
    house.near.grant(victim, 8)
    cases = [GREEDY, SAMPLED, Case("long", LONG_PROMPT[:500], SEEDED)]
    expected = [house.in_quiet(pair, case) for case in cases]
    running = [pair.start(case, house.large) for case in cases]
    for number in range(6):
        victim("add", f"lost-{number}", list(LONG_PROMPT[:200]), SEEDED, {"cache_salt": str(number)})
    victim("step", 8)
    pair.step(6)
    victim("abort", ["lost-0", "lost-1"])
    victim("die_at", point)
    victim("take", 7, 60.0)
    with pytest.raises(WorkerFailed, match="the process ended with -9"):
        victim("step", 3)
    return running, expected


@pytest.mark.parametrize("point", STEPS)
def test_a_worker_killed_during_a_take_harms_no_sibling(house: House, pair: Pair, point: str) -> None:
    """Its memory is scrubbed and lent on, and the sibling's answers are those of a quiet run."""
    house.near.settle(house.small, 0)
    victim = house.start()
    try:
        running, expected = killed_while_taking(house, pair, victim, point)
        house.near.ledger.give_back_all(_name(victim))
        _scrub(house.near, house.near.ledger)
        house.near.grant(house.large, 8)
        assert pair.finish(*running) == expected
    finally:
        victim.close()


def _scrub(device: Device, ledger: GranuleLedger) -> None:
    device.arena._scrub(list(ledger._free))


def test_an_engine_that_cannot_lend_says_why_and_keeps_its_own_memory(house: House) -> None:
    """Such a model is served as before."""
    worker = house.start(num_gpu_blocks_override=80)
    try:
        assert worker("why_no_arena") == "the engine's options set how much KV it has"
        worker("add", "one", list(PROMPT), {"max_tokens": 2, "ignore_eos": True}, {})
        assert [output["tokens"] for output in worker("step", 2)]
        worker("take", 3, 60.0)
        worker("step")
        assert [answer.granules for answer in worker("returned")] == [()]
    finally:
        worker.close()
