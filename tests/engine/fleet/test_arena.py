"""A device's memory that its workers share: private to them, and freed when unused."""

import mmap
import os
from collections.abc import Iterator

import pytest

from melld.engine.fleet.arena import Arena

GRANULE_BYTES = 1 << 16


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(1 << 40, GRANULE_BYTES)  # more than any machine has
    yield made
    made.close()


async def test_only_used_memory_is_backed_and_scrubbing_frees_it(arena: Arena) -> None:
    """A device may have room for more KV than is ever used, and ended requests leave no tokens behind."""
    file = os.open(arena.spec().path, os.O_RDWR)
    assert arena.resident_bytes == 0
    with mmap.mmap(file, 4 * GRANULE_BYTES) as mapped:
        mapped[:] = b"x" * len(mapped)
        assert arena.resident_bytes == 4 * GRANULE_BYTES
        await arena.scrub([3, 1])
        assert arena.resident_bytes == 2 * GRANULE_BYTES
        kept = [mapped[granule * GRANULE_BYTES :][:GRANULE_BYTES].count(b"x") for granule in range(4)]
        assert kept == [GRANULE_BYTES, 0, GRANULE_BYTES, 0]
    os.close(file)
