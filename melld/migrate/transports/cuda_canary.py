"""A known pattern beside a worker's KV memory, with which peers check that they read the right bytes.

Some drivers and boards offer access to a peer's memory, raise no error, and deliver wrong bytes: KV would be corrupted
silently.  So a way to copy is used only after it has delivered the whole pattern.
"""

import numpy as np
import torch

from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.transport import Begin, TransportFailed

BLOCKS, CHUNK_BYTES = 64, 4096
LAYOUT = KvLayout(BLOCKS, CHUNK_BYTES, CHUNK_BYTES, (0,), BLOCKS * CHUNK_BYTES)
"""256 KiB, copied like scattered blocks."""


def pattern(seed: int) -> torch.Tensor:
    """Return the pattern of `seed` (uint8, on the host); no two blocks are alike."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, LAYOUT.region_bytes, dtype=np.uint8))


def require_delivered(transport: str, begin: Begin, region: torch.Tensor, seed: int) -> None:
    """Copy the peer's pattern into `region` (uint8, ours, `LAYOUT`).

    Raises:
        TransportFailed: other bytes have arrived.
    """
    region.zero_()
    if region.is_cuda:
        torch.cuda.synchronize(region.device)  # the copy runs on a stream of its own
    source, destination = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
    begin(source, destination)()
    expected = pattern(seed).view(BLOCKS, CHUNK_BYTES).flip(0)
    if not torch.equal(region.cpu().view(BLOCKS, CHUNK_BYTES), expected):
        raise TransportFailed(transport, "it delivers different bytes from the peer's")
