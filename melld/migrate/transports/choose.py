"""Choice of the transport to a peer, by trying and measuring, never by a device's name.

Tries the most direct transport first.  Measures what works: on CUDA to choose between SMs and copy engines, everywhere
to know the link's rate.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from melld.migrate.transports import nixl, shared_memory
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.transport import KvHandle, Link, TransportFailed

log = logging.getLogger("melld.worker")

OpenLink = Callable[[KvHandle, torch.Tensor, KvLayout], Link]


class OpenedLink(msgspec.Struct, frozen=True):
    """A working link, and its rate when tried."""

    transport: str
    link: Link
    bytes_per_s: float


def export(tensors: Sequence[torch.Tensor], layout: KvLayout) -> bytes:
    """Return a handle of this worker's KV memory for its siblings.

    Raises:
        TransportFailed: this memory cannot be shared; its requests can still move by tokens.
    """
    if tensors[0].device.type == "cpu":
        return shared_memory.export(tensors, layout)
    from melld.migrate.transports import cuda_peer

    return cuda_peer.export(tensors, layout)


def open_best(
    handle_bytes: bytes,
    region: torch.Tensor,
    layout: KvLayout,
    scratch: Sequence[int],
    agent: nixl.NixlAgent | None = None,
) -> OpenedLink:
    """Open the peer's memory in the most direct way that works here.

    `scratch`: free blocks of ours; the trial overwrites them.  `agent`: what opens memory on other machines.

    Raises:
        TransportFailed: no way works; the message says why each failed.
        msgspec.ValidationError: the bytes are no handle.
    """
    handle = msgspec.msgpack.decode(handle_bytes, type=KvHandle)
    failures: list[str] = []
    for name, open_link in _ways(handle, agent):
        with contextlib.ExitStack() as opened:
            try:
                link = open_link(handle, region, layout)
                opened.callback(link.close)
                rate = rate_of(link, scratch)
            except TransportFailed as error:
                failures.append(str(error))
            except Exception as error:  # noqa: BLE001  a driver, a compiler, torch: the next way may do
                failures.append(f"{name}: {type(error).__name__}: {error}")
            else:
                opened.pop_all()
                for failure in failures:
                    log.warning("using %s, because another transport does not work: %s", name, failure)
                return OpenedLink(name, link, rate)
    raise TransportFailed(handle.transport, "; ".join(failures) or "unknown kind of memory")


def _ways(handle: KvHandle, agent: nixl.NixlAgent | None) -> list[tuple[str, OpenLink]]:
    if handle.transport == nixl.NAME:
        return [(nixl.NAME, agent.open_link)] if agent is not None else []
    if handle.transport == shared_memory.NAME:
        return [(shared_memory.NAME, shared_memory.open_link)]
    from melld.migrate.transports import cuda_peer, cuda_staged

    if handle.transport == cuda_peer.NAME:
        return [(cuda_peer.NAME, cuda_peer.open_link), (cuda_staged.NAME, cuda_staged.open_link)]
    return []


def rate_of(link: Link, scratch: Sequence[int]) -> float:
    """Return the bytes per second of a copy from the peer's first blocks to our scratch blocks; 0 without any."""
    count = min(len(scratch), link.source.num_blocks)
    if not count:
        return 0.0
    source, destination = range(count), list(scratch)[:count]
    link.begin(source, destination)()  # the first copy may compile a kernel
    began_s = time.perf_counter()
    link.begin(source, destination)()
    seconds = time.perf_counter() - began_s
    return count * link.source.block_bytes / max(seconds, 1e-9)
