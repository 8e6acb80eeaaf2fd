"""KV links of a worker with several devices: rank i of the destination pulls from rank i of the source.

Owns the line to each rank, whose thread copies while the ranks compute.  Block numbers are the same on all ranks, so
one plan serves them all.  A line carries MessagePack; its descriptors were made before the ranks were forked.

    worker: Copies ──► Puller ──► RanksLink ──line i──► rank i: Link ──► KV memory of the peer's rank i
"""

import contextlib
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.memory import KvMemory
from melld.errors import MelldError
from melld.migrate.transports import choose
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.transport import KvHandle, Link, TransportFailed, Wait, done, handle_of

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

NAME = "ranks"


class _Opened(msgspec.Struct, frozen=True):
    """A rank's report of a link that it has opened."""

    transport: str
    source: KvLayout
    destination: KvLayout


class _Answer(msgspec.Struct, frozen=True):
    """A rank's answer to one call: its result, or why there is none."""

    result: Any = None
    failure: str = ""


class Lines:
    """The worker's ends of its lines to the ranks.  One call at a time, to all ranks at once."""

    def __init__(self, ranks: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(ranks)]
        self._ours: list[Connection] = []
        self._forked = 0
        self._lock = threading.Lock()

    def forked(self) -> None:
        """Count, in the worker, a rank that was forked."""
        self._forked += 1

    def own_in_rank(self) -> None:
        """Close, in a freshly forked rank, every end but its own."""
        global _line  # noqa: PLW0603  a rank is a process: it has one line
        if _line is not None:  # what a rank forks
            return
        _line = Connection(self._pairs[self._forked][1].detach())
        for pair in self._pairs:
            for end in pair:
                end.close()

    def serve(self, executor: "Executor", num_blocks: int) -> bytes:
        """Have each rank share its memory and serve its line; return the combined handle for siblings.

        Raises:
            TransportFailed: a rank's memory cannot be shared.
        """
        for ours, theirs in self._pairs:
            theirs.close()
            self._ours.append(Connection(ours.detach()))
        executor.collective_rpc(_serve, args=(num_blocks,))
        handles: list[bytes] = self.call("export")
        layout = msgspec.msgpack.decode(handles[0], type=KvHandle).layout
        return handle_of(NAME, layout, handles)

    def open(self, handle_bytes: bytes, scratch: Sequence[int]) -> choose.OpenedLink:
        """Open a link from each rank to the peer's rank of the same number.

        Raises:
            TransportFailed: the peer has another number of ranks, or a rank cannot open its link.
        """
        handle = msgspec.msgpack.decode(handle_bytes, type=KvHandle)
        theirs = msgspec.msgpack.decode(handle.where, type=list[bytes]) if handle.transport == NAME else [handle_bytes]
        if len(theirs) != len(self._ours):
            raise TransportFailed(NAME, f"the peer has {len(theirs)} devices, and this worker {len(self._ours)}")
        with contextlib.ExitStack() as unless_opened:
            unless_opened.callback(self.call, "close", theirs[0])  # some ranks may have opened theirs
            opened = [msgspec.convert(one, _Opened) for one in self.call("open", theirs[0], list(scratch), each=theirs)]
            link = RanksLink(self, theirs[0], opened[0].source, opened[0].destination)
            rate = choose.rate_of(link, scratch)
            unless_opened.pop_all()
        return choose.OpenedLink(f"{opened[0].transport} of {len(theirs)} ranks", link, rate)

    def call(self, name: str, *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
        """Call a method of `_Rank` on all ranks and return their results.  `each`: one more first argument for each.

        Raises:
            TransportFailed: a rank could not do it.
        """
        with self._lock:
            for index, line in enumerate(self._ours):
                line.send_bytes(msgspec.msgpack.encode((name, [*each[index : index + 1], *arguments])))
            answers = [msgspec.msgpack.decode(line.recv_bytes(), type=_Answer) for line in self._ours]
        for answer in answers:
            if answer.failure:
                raise TransportFailed(NAME, answer.failure)
        return [answer.result for answer in answers]


class RanksLink(Link):
    """The links of all ranks to a peer's ranks, which have the memory.  `key`: the peer's identifier."""

    def __init__(self, lines: Lines, key: bytes, source: KvLayout, destination: KvLayout) -> None:
        self.source = source
        self.destination = destination
        self._lines = lines
        self._key = key

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`; done on return."""
        self._lines.call("copy", self._key, list(source_blocks), list(destination_blocks))
        return done

    def delivered(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> bool:
        """See `Link`."""
        return all(self._lines.call("delivered", self._key, list(source_blocks), list(destination_blocks)))

    def close(self) -> None:
        """Unmap the peer's memory."""
        self._lines.call("close", self._key)


_line: Connection | None = None


def _serve(rank: Any, num_blocks: int) -> None:
    assert _line is not None, "this rank was not forked"
    threading.Thread(target=_Rank(rank, num_blocks).serve, args=(_line,), name="copies", daemon=True).start()


class _Rank:
    """A rank's end: its memory and its links, by the handle of the peer's first rank."""

    def __init__(self, rank: Any, num_blocks: int) -> None:
        self._runner, self._num_blocks = rank.worker.model_runner, num_blocks
        self._links: dict[bytes, Link] = {}

    def serve(self, line: Connection) -> None:
        """Answer calls until the worker ends."""
        if self._runner.device.type == "cuda":
            import torch

            torch.cuda.set_device(self._runner.device)
        while True:
            name, arguments = msgspec.msgpack.decode(line.recv_bytes())
            try:
                answer = _Answer(getattr(self, name)(*arguments))
            except (MelldError, ValueError, OSError, RuntimeError) as error:
                answer = _Answer(failure=f"{type(error).__name__}: {error}")
            line.send_bytes(msgspec.msgpack.encode(answer))

    def export(self) -> bytes:
        """Return the handle of this rank's memory."""
        self._memory = KvMemory(self._runner, self._num_blocks)
        return choose.export(self._memory.tensors, self._memory.layout)

    def open(self, handle: bytes, key: bytes, scratch: list[int]) -> _Opened:
        """Open the best link to the memory of that handle."""
        opened = choose.open_best(handle, self._memory.region, self._memory.layout, scratch)
        self._links[key] = opened.link
        return _Opened(opened.transport, opened.link.source, opened.link.destination)

    def copy(self, key: bytes, source: list[int], destination: list[int]) -> None:
        """Copy these blocks; return when they are here."""
        self._links[key].begin(source, destination)()

    def delivered(self, key: bytes, source: list[int], destination: list[int]) -> bool:
        """Return True if these blocks have the bytes of the peer's."""
        return self._links[key].delivered(source, destination)

    def close(self, key: bytes) -> None:
        """Close the link to that peer, if it could be opened."""
        if (link := self._links.pop(key, None)) is not None:
            link.close()
