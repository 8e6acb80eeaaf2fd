"""Withholds ungranted blocks of its arena from an engine, and empties granules that it returns.

Owns the granted granules.  For the engine thread, between two steps; granules are given back with none in flight.

    every block but the null block:  held here (one reference that no table has)  or  vLLM's, free or in tables
    held = touches a granule that is not granted

To give back a granule, its free blocks are held, and its live ones move: bytes, tables, prefix cache, and the runner's
rows.  Only blocks whose every reference is in a running request's table can move; those of requests that arrive, leave
or wait with their KV are pinned, as others know their ids.
"""

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.arena import ArenaMemory
from melld.engine.worker.residency.block_tables import BlockEpochs
from melld.engine.worker.residency.memory import KvMemory
from melld.engine.worker.residency.runner import RunnerV1, runner_of
from melld.landlord.blocks import BlockMap, choose_granules

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

NOBODYS = 0
"""The granule that is lent to none."""
Places = dict[int, list[tuple[str, int, int]]]
"""Places in tables of running requests by block: request, group, place."""


class Emptied(msgspec.Struct, frozen=True):
    """Granules that are no longer used."""

    granules: tuple[int, ...] = ()
    moved_blocks: int = 0


class LentBlocks:
    """The blocks of one engine in an arena.  It starts without any."""

    def __init__(self, engine: "EngineCore", arena: ArenaMemory, memory: KvMemory, epochs: BlockEpochs) -> None:
        self.map: BlockMap = arena.blocks(memory.layout)
        self.granted: set[int] = set()
        self._engine = engine
        self._epochs = epochs
        self._scheduler: Any = engine.scheduler
        manager = self._scheduler.kv_cache_manager
        self._pool: Any = manager.block_pool
        self._groups: list[Any] = manager.coordinator.single_type_managers
        runner = runner_of(engine)
        assert isinstance(runner, RunnerV1), "other engines have no arena (`arena`)"
        self._runner = runner
        self._lent = arena.memory
        self._bytes = memory.region
        self._usable: set[int] = set()
        self._hold(range(1, self.map.blocks))

    @property
    def held(self) -> int:
        """Return how many blocks vLLM may not use."""
        return self.map.blocks - 1 - len(self._usable)

    def grant(self, granules: Collection[int]) -> None:
        """Let vLLM use these granules."""
        self._lent.begin(granules)
        self.granted.update(granules)
        self._let_go(self.map.usable(granules, self.granted) - self._usable)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Within the block, let vLLM use the scratch blocks for one of the worker's own requests."""
        assert not self.granted
        self._lent.begin((NOBODYS,))
        self._let_go(self.map.scratch)
        yield
        self._hold(self.map.scratch)

    @property
    def in_flight(self) -> bool:
        """Return True while the engine computes a step ahead: `empty` must wait."""
        return bool(self._engine.batch_queue)

    def end_step(self) -> tuple[Any, bool]:
        """Finish the oldest step in flight, as `EngineCore.step_fn` does, but start none."""
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        ended: tuple[Any, bool] = self._engine.step_fn()
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        return ended

    def lacks(self, count: int) -> bool:
        """Return True if emptying this many granules would surely need a preemption."""
        whole_blocks = self.map.granule_bytes // self.map.block_bytes - 1  # of each granule, at least
        return min(count, len(self.granted)) * whole_blocks > int(self._pool.get_num_free_blocks())

    def empty(self, count: int, *, preempts: bool) -> Emptied | None:
        """Return granules to the daemon; return None, unchanged, if that is impossible now.

        `preempts`: rather have requests wait, the youngest first, and give back what is possible.
        """
        assert not self.in_flight
        count = min(count, len(self.granted))
        if not preempts and self.lacks(count):
            return None  # as the rest would find, at the cost of a look at every block
        live, places = self._live()
        granules = self._choose(count, live)
        while not self._has_room(granules):
            if not preempts:
                return None
            if self._preempt():
                live, places = self._live()
                granules = self._choose(count, live)
            else:
                granules.pop()
        if len(granules) < count and not preempts:
            return None
        moving = self._withdraw(granules, live, places)
        self._lent.end(granules)
        return Emptied(tuple(granules), moving)

    # ---------------------------------------------------------------------------------------------------------------

    def _live(self) -> tuple[dict[int, bool], Places]:
        """Return the blocks in use, whether each may be moved, and their positions."""
        running = {request.request_id for request in self._scheduler.running}
        places: Places = {}
        for group, manager in enumerate(self._groups):
            for request_id in running & manager.req_to_blocks.keys():
                for place, block in enumerate(manager.req_to_blocks[request_id]):
                    places.setdefault(block.block_id, []).append((request_id, group, place))
        blocks = self._pool.blocks
        counts = {block: blocks[block].ref_cnt for block in self._usable if blocks[block].ref_cnt}
        return {block: len(places.get(block, ())) == count for block, count in counts.items()}, places

    def _choose(self, count: int, live: dict[int, bool]) -> list[int]:
        blocks = self._pool.blocks
        cached = [block for block in self._usable if block not in live and blocks[block].block_hash is not None]
        return choose_granules(self.map, self.granted, count, live, cached)

    def _has_room(self, granules: list[int]) -> bool:
        """Return True if the others have a free block for each live one of these granules."""
        return len(self.map.usable(granules, self.granted)) <= int(self._pool.get_num_free_blocks())

    def _withdraw(self, granules: list[int], live: dict[int, bool], places: Places) -> int:
        """Hold all blocks of these granules; return how many had to be moved."""
        lost = self.map.usable(granules, self.granted)
        moving = sorted(block for block in lost if block in live)
        self._hold(lost.difference(moving))
        fresh = self._pool.get_new_blocks(len(moving))
        moved: set[str] = set()
        for block, new in zip(moving, fresh, strict=True):
            self._move(self._pool.blocks[block], new, places[block])
            moved.update(request_id for request_id, _, _ in places[block])
        self._usable.difference_update(moving)  # each has one reference left, which is ours
        self.granted.difference_update(granules)
        for request_id in moved:
            self._epochs.moved(self._scheduler.requests[request_id])
        return len(moving)

    def _move(self, old: Any, new: Any, places: list[tuple[str, int, int]]) -> None:
        size = self.map.block_bytes
        there, here = new.block_id * size, old.block_id * size
        self._bytes[there : there + size].copy_(self._bytes[here : here + size])
        self._pool.move_block_hashes(old, new)
        for request_id, group, place in places:
            self._groups[group].req_to_blocks[request_id][place] = new
            self._runner.replace_block(request_id, group, place, new.block_id)
        others = len(places) - 1
        self._pool.touch([new] * others)
        self._pool.free_blocks([old] * others)

    def _preempt(self) -> bool:
        """Preempt the youngest running request, as vLLM does when short of memory; return False if none runs."""
        scheduler = self._scheduler
        if not scheduler.running:
            return False
        youngest = max(scheduler.running, key=lambda request: (request.priority, request.arrival_time))
        scheduler.running.remove(youngest)
        scheduler._preempt_request(youngest, time.monotonic())  # noqa: SLF001
        # As in Scheduler.reset_prefix_cache: it may come back in the next step.
        scheduler.prev_step_scheduled_req_ids.discard(youngest.request_id)
        return True

    def _hold(self, block_ids: Iterable[int]) -> None:
        """Take free blocks from vLLM, with what its prefix cache has in them."""
        ids = sorted(block_ids)
        self._pool.evict_blocks(set(ids))
        self._pool.touch([self._pool.blocks[block] for block in ids])
        self._usable.difference_update(ids)

    def _let_go(self, block_ids: Iterable[int]) -> None:
        """Return held blocks to vLLM, which uses low numbers first."""
        ids = sorted(block_ids)
        self._pool.free_blocks([self._pool.blocks[block] for block in ids])
        self._usable.update(ids)
