"""Engines that share GPU memory, over a test library: real engines on the CPU, in chunks of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from melld.engine.fleet.arena import GpuArena
from tests.engine.fake_cuda import build
from tests.engine.worker.residency import test_arena as on_cpu
from tests.engine.worker.residency.driver import WorkerFailed, WorkerProxy
from tests.engine.worker.residency.pair import Pair
from tests.engine.worker.residency.test_arena import ARENA_BYTES, GRANULE_BYTES, Device, House
from tests.engine.worker.residency.test_residency import CASES, GREEDY

POISON = b"\xff" * GRANULE_BYTES
"""Not a number, as float32."""


class PoisonedDevice(Device):
    """A device whose unused memory is poison, since only the next user clears it."""

    def check_zero(self, granules: tuple[int, ...]) -> None:
        for granule in granules:
            self.poison(granule)

    def poison(self, granule: int) -> None:
        assert isinstance(self.arena, GpuArena)
        [file] = self.arena.spec().files
        assert os.pwrite(file, POISON, granule * GRANULE_BYTES) == GRANULE_BYTES


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


def begin(library: Path, model: Path, arena: GpuArena, **options: Any) -> WorkerProxy:
    spec = msgspec.to_builtins(arena.spec())
    return WorkerProxy(str(model), {"libcuda": str(library), "arena": spec} | options)


@pytest.fixture(scope="module")
def house(library: Path, demo_model: Path) -> Iterator[House]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library.parent))
        near, far = (GpuArena("GPU-1", ARENA_BYTES, GRANULE_BYTES) for _ in range(2))
    devices = PoisonedDevice(near), PoisonedDevice(far)  # type: ignore[arg-type]
    for granule in range(17):
        devices[0].poison(granule)
    given = [(near, {}), (near, {"block_size": 96}), (far, {})]
    workers = [begin(library, demo_model, arena, **options) for arena, options in given]
    try:
        for worker in workers:
            worker.receive()
        yield House(*devices, *workers, demo_model)
    finally:
        for worker in workers:
            worker.close()
        near.close()
        far.close()


pair = on_cpu.pair


def test_an_engine_in_gpu_memory_answers_as_in_private_memory(pair: Pair, plain_pair: Pair) -> None:
    """Wherever its KV lies, and whatever the memory held before."""
    assert plain_pair.all_unmoved(CASES) == pair.all_unmoved(CASES)


@pytest.mark.long
def test_granules_pass_both_ways_under_load_without_changing_answers(house: House, pair: Pair) -> None:
    """What one engine gives back is cleared by the next one."""
    on_cpu.test_granules_pass_both_ways_under_load_without_changing_answers(house, pair, 0)


def test_the_trial_token_needs_no_grant(house: House, pair: Pair) -> None:
    """A worker proves that it works in memory that is nobody's, and that others have written to."""
    house.near.settle(house.small, 0)
    said = []
    for number in range(2):
        house.near.check_zero((0,))
        said.append(house.small("use_scratch", f"first-{number}", list(GREEDY.prompt)))
    house.small("check_pool")
    assert said[0] == said[1]
    assert len(said[0]) == 3


def test_requests_move_by_their_tokens(house: House) -> None:
    """Siblings cannot read this memory, and are not told that they could."""
    assert house.small("handle") == b""


@pytest.mark.parametrize("point", on_cpu.STEPS)
def test_a_worker_killed_during_a_take_harms_no_sibling(house: House, pair: Pair, library: Path, point: str) -> None:
    """Nobody scrubs its memory, and nobody is disturbed by what it left."""
    house.near.settle(house.small, 0)
    arena = house.near.arena
    assert isinstance(arena, GpuArena)
    victim = begin(library, house.model, arena)
    try:
        victim.receive()
        running, expected = on_cpu.killed_while_taking(house, pair, victim, point)
        house.near.ledger.give_back_all(on_cpu._name(victim))
        house.near.grant(house.large, 8)
        assert pair.finish(*running) == expected
    finally:
        victim.close()


def test_an_engine_whose_kv_cannot_be_lent_does_not_start(house: House, library: Path) -> None:
    """It would take memory that the device does not have; the operator reads why."""
    arena = house.near.arena
    assert isinstance(arena, GpuArena)
    worker = begin(library, house.model, arena, num_gpu_blocks_override=80)
    try:
        with pytest.raises(WorkerFailed, match=r"lent_kv_bytes.*the engine's options set how much KV it has"):
            worker.receive()
    finally:
        worker.close()
