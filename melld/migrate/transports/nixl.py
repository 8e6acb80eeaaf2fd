"""Transport between machines: NIXL reads a peer's blocks into a buffer, from which they are copied to their places.

Owns the worker's one agent and its buffers.  A READ that was given up, as its peer froze, may still be carried out when
the peer thaws: so none writes to KV blocks, and the buffer of one given up is not used again.

    peer's blocks ──READ──► buffer ──copy──► our blocks        while one buffer is filled, another is emptied
"""

import contextlib
import importlib
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views
from melld.migrate.transports.transport import (
    KvHandle,
    Link,
    LinkBroken,
    TransportFailed,
    Wait,
    handle_of,
    require_fit,
)

NAME = "nixl"
BUFFER_BYTES = 16 << 20
BUFFER_BLOCKS = 8
"""A buffer holds at least as many blocks, as many as a new link is tried with, and a piece of a pull."""
POLL_S = 1e-4
STUCK_S = 5.0
"""A READ that takes longer is given up."""
MOST_STUCK = 4
"""After so many READs given up this worker reads nothing more from other machines."""


class _Where(msgspec.Struct, frozen=True):
    """An agent's memory: `metadata` is what NIXL connects by."""

    metadata: bytes
    address: int
    device: int


class _Buffer(NamedTuple):
    """Memory that READs write to.  `rows`: its blocks as NIXL knows them."""

    memory: torch.Tensor
    rows: Any


class NixlAgent:
    """The agent of a worker.  `region`: the bytes (uint8) of its KV memory; `interface`: as UCX names it."""

    def __init__(self, region: torch.Tensor, layout: KvLayout, interface: str) -> None:
        """Register the memory.

        Raises:
            TransportFailed: NIXL is not installed, or cannot use this memory or that interface.
        """
        os.environ |= {"UCX_NET_DEVICES": interface, "NIXL_LOG_LEVEL": "WARN"}
        self._region = region
        self.buffer_layout = packed_layout(layout, max(BUFFER_BLOCKS, BUFFER_BYTES // layout.block_bytes))
        self._free: list[_Buffer] = []
        self._stuck: list[_Buffer] = []
        self._lock = threading.Lock()
        try:
            nixl: Any = importlib.import_module("nixl._api")
            self._agent = nixl.nixl_agent(secrets.token_hex(8), nixl.nixl_agent_config(backends=["UCX"]))
            self._register(region)
            metadata = self._agent.get_agent_metadata()
        except ModuleNotFoundError:
            raise TransportFailed(NAME, "NIXL is not installed") from None
        except Exception as error:  # NIXL's many
            raise TransportFailed(NAME, f"{type(error).__name__}: {error}") from error
        where = _Where(metadata, region.data_ptr(), max(region.get_device(), 0))
        self.handle = handle_of(NAME, layout, where)

    def open_link(self, handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "NixlLink":
        """Connect to the peer.

        Raises:
            TransportFailed: the peer has blocks of another shape.  NIXL raises its own for others.
        """
        require_fit(NAME, handle.layout, layout)
        where = msgspec.msgpack.decode(handle.where, type=_Where)
        with self._lock:
            peer = self._agent.add_remote_agent(where.metadata)
            rows = self._prepare(peer, where.address, where.device, handle.layout)
        return NixlLink(self, peer, rows, handle.layout, region, layout)

    def close_link(self, peer: Any, rows: Any) -> None:
        """Disconnect from a peer, which may be gone."""
        with self._lock:
            with contextlib.suppress(Exception):
                self._agent.release_dlist_handle(rows)
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer)

    def begin(self, rows: Any, source: KvLayout, blocks: Sequence[int]) -> tuple[_Buffer, Any]:
        """Begin to read the blocks into the first places of a buffer; `rows`: all of the peer's blocks.

        Raises:
            LinkBroken: the peer is gone.
        """
        buffer = self._take()
        places = _numbers(self.buffer_layout, range(len(blocks)))
        try:
            with self._lock:
                reading = self._agent.make_prepped_xfer("READ", buffer.rows, places, rows, _numbers(source, blocks))
                self._agent.transfer(reading)
        except Exception as error:
            self.give_back(buffer)
            raise LinkBroken(NAME, f"{type(error).__name__}: {error}") from error
        return buffer, reading

    def end(self, buffer: _Buffer, reading: Any) -> None:
        """Wait until a READ has ended.

        Raises:
            LinkBroken: it failed, or is given up; the buffer is not to be used.
        """
        deadline_s = time.monotonic() + STUCK_S
        while (state := self._state(reading)) == "PROC" and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        with self._lock, contextlib.suppress(Exception):
            self._agent.release_xfer_handle(reading)
        if state == "PROC":
            self._stuck.append(buffer)
            raise LinkBroken(NAME, f"the peer's blocks did not come within {STUCK_S:g} s")
        if state != "DONE":
            self.give_back(buffer)
            raise LinkBroken(NAME, f"the peer's blocks did not come: {state}")

    def give_back(self, buffer: _Buffer) -> None:
        """Take back a buffer whose contents are no longer needed."""
        self._free.append(buffer)

    def _take(self) -> _Buffer:
        if len(self._stuck) >= MOST_STUCK:
            raise LinkBroken(NAME, f"{len(self._stuck)} reads from other machines hang")
        with self._lock:
            if self._free:
                return self._free.pop()
            layout = self.buffer_layout
            memory = torch.empty(layout.region_bytes, dtype=torch.uint8, device=self._region.device)
            self._register(memory)
            rows = self._prepare("", memory.data_ptr(), max(memory.get_device(), 0), layout)
        return _Buffer(memory, rows)

    def _register(self, memory: torch.Tensor) -> None:
        device = max(memory.get_device(), 0)
        self._agent.register_memory([(memory.data_ptr(), memory.numel(), device, "")], self._kind)

    def _prepare(self, owner: Any, address: int, device: int, layout: KvLayout) -> Any:
        return self._agent.prep_xfer_dlist(owner, _rows(address, device, layout), self._kind)

    @property
    def _kind(self) -> str:
        return "VRAM" if self._region.is_cuda else "DRAM"

    def _state(self, reading: Any) -> str:
        try:
            with self._lock:
                return str(self._agent.check_xfer_state(reading))
        except Exception as error:  # noqa: BLE001  NIXL's many: whatever it is, the read has failed
            return f"{type(error).__name__}: {error}"


class NixlLink(Link):
    """Link to a worker of another machine.  The first READ connects."""

    def __init__(
        self, agent: NixlAgent, peer: Any, rows: Any, source: KvLayout, region: torch.Tensor, destination: KvLayout
    ) -> None:
        super().__init__(source, region, destination)
        self._agent = agent
        self._peer = peer
        self._rows = rows

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  The blocks are in their places after the wait."""
        buffer, reading = self._agent.begin(self._rows, self.source, source_blocks)

        def land() -> None:
            self._agent.end(buffer, reading)
            places = torch.tensor(destination_blocks, device=buffer.memory.device)
            pairs = paired_views(self.region, self.destination, buffer.memory, self._agent.buffer_layout)
            for ours, theirs in pairs:
                ours[:, places] = theirs[:, : len(destination_blocks)]
            if buffer.memory.is_cuda:
                torch.cuda.current_stream(buffer.memory.device).synchronize()
            self._agent.give_back(buffer)

        return land

    def into(self, region: torch.Tensor, layout: KvLayout) -> "NixlLink":
        """See `Link`."""
        return NixlLink(self._agent, self._peer, self._rows, self.source, region, layout)

    def close(self) -> None:
        """Disconnect."""
        self._agent.close_link(self._peer, self._rows)


def _rows(address: int, device: int, layout: KvLayout) -> npt.NDArray[np.uint64]:
    """Return address, length and device of each chunk, chunk by chunk."""
    blocks = np.arange(layout.num_blocks, dtype=np.uint64) * np.uint64(layout.block_stride_bytes)
    chunks = np.array(layout.chunk_offsets, dtype=np.uint64) + np.uint64(address)
    addresses = (chunks[:, None] + blocks).ravel()
    return np.stack(np.broadcast_arrays(addresses, np.uint64(layout.chunk_bytes), np.uint64(device)), axis=1)


def _numbers(layout: KvLayout, blocks: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the rows of these blocks."""
    chunks = np.arange(len(layout.chunk_offsets), dtype=np.int32) * np.int32(layout.num_blocks)
    return (chunks[:, None] + np.array(blocks, dtype=np.int32)).ravel()
