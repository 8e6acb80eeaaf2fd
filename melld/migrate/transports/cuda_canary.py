"""A known pattern beside a worker's KV memory, by which its peers see that they read what is there.

Owns the pattern.  Some drivers and boards offer access to a peer's memory, raise no error, and deliver other bytes:
KV would be damaged in silence.  So a way to copy is used only once it has delivered the pattern whole.
"""

import numpy as np
import torch

from melld.migrate.transports.copiers import Begin
from melld.migrate.transports.layout import KvLayout

BLOCKS, CHUNK_BYTES = 64, 4096
LAYOUT = KvLayout(BLOCKS, CHUNK_BYTES, CHUNK_BYTES, (0,), BLOCKS * CHUNK_BYTES)
"""256 KiB, copied as scattered blocks are."""


def pattern(seed: int) -> torch.Tensor:
    """The bytes (uint8, on the host) that `seed` stands for: no two blocks are alike."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, LAYOUT.region_bytes, dtype=np.uint8))


def is_delivered(begin: Begin, region: torch.Tensor, seed: int) -> bool:
    """Whether a way from a peer's pattern into `region` (uint8, ours, `LAYOUT`) delivers each block where it should."""
    region.zero_()
    if region.is_cuda:
        torch.cuda.synchronize(region.device)  # the copy runs on a stream of its own
    source, destination = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
    begin(source, destination)()
    expected = pattern(seed).view(BLOCKS, CHUNK_BYTES).flip(0)
    return bool(torch.equal(region.cpu().view(BLOCKS, CHUNK_BYTES), expected))
