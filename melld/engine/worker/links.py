"""A worker's links to its siblings' KV memory: one per sibling process while it lives, each with its copying thread.

Owns the links.  `open`, `tried` and `close` are for the engine thread; their slow parts run on other threads.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.wire.spec import ArenaSpec, CopyRules
from melld.engine.worker.rank_links import Lines
from melld.engine.worker.residency.block_tables import keeps_kv
from melld.engine.worker.residency.memory import KvMemory, kv_memory_of
from melld.engine.worker.residency.residency import Residency
from melld.engine.worker.residency.rules import kv_refusal
from melld.errors import MelldError
from melld.migrate.transports import choose, nixl, shared_memory
from melld.migrate.transports.copies import Copies, CopyDone
from melld.migrate.transports.layout import UnsupportedLayout
from melld.migrate.transports.transport import Puller, TransportFailed

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

log = logging.getLogger("melld.worker")

TRIAL_BLOCKS = 8


class Shared(NamedTuple):
    """The engine's KV memory and its handle for siblings, or why it cannot be shared; neither where there is no KV."""

    memory: KvMemory | None = None
    handle: bytes = b""
    failure: str = ""
    lines: Lines | None = None
    """To the ranks, which have the memory, of a worker with several devices."""
    agent: nixl.NixlAgent | None = None
    """Which shares the memory with workers of other machines, too."""
    far_failure: str = ""
    """Why it cannot be shared with those, though that is configured."""


def share_memory(engine: "EngineCore", arena: ArenaSpec | None, kv_interface: str | None = None) -> Shared:
    """Share the engine's KV memory with its siblings.  `arena`: where it is already; None: memory of its own.

    `kv_interface`: over which workers of other machines read it, too; None: they do not.
    """
    shared = _share_here(engine, arena)
    if kv_interface is None or shared == Shared():
        return shared
    try:
        if shared.memory is None:
            raise TransportFailed(nixl.NAME, shared.failure or "KV of multi-device workers stays on its machine")
        agent = nixl.NixlAgent(shared.memory.region, shared.memory.layout, kv_interface)
        return shared._replace(agent=agent)
    except TransportFailed as error:
        log.warning("requests move to other machines by recomputing tokens: %s", error)
        return shared._replace(far_failure=str(error))


def _share_here(engine: "EngineCore", arena: ArenaSpec | None) -> Shared:
    if not keeps_kv(engine.scheduler):
        return Shared()
    try:
        if (refusal := kv_refusal(engine.scheduler)) is not None:
            raise UnsupportedLayout(refusal.value)
        if engine.vllm_config.parallel_config.world_size > 1:
            lines: Lines | None = getattr(engine.model_executor, "lines", None)
            if lines is None:
                raise UnsupportedLayout("its ranks are not its forks")
            return Shared(
                handle=lines.serve(engine.model_executor, engine.scheduler.kv_cache_config.num_blocks), lines=lines
            )
        memory = kv_memory_of(engine)
        if arena is not None and arena.chunks:
            return Shared(memory, failure="lent GPU memory cannot be read by siblings")
        if arena is not None:
            return Shared(memory, shared_memory.export_arena(arena.path, arena.inode, memory.layout))
        return Shared(memory, choose.export(memory.tensors, memory.layout))
    except (UnsupportedLayout, TransportFailed) as error:
        log.warning("cannot share this worker's KV memory, so its requests move by recomputing tokens: %s", error)
        return Shared(failure=str(error))


class Opening(msgspec.Struct, frozen=True):
    """A `wire.OpenLink` command with its payload."""

    peer: str
    handle: bytes


class LinkTried(msgspec.Struct, frozen=True):
    """The end of an attempt to open a link; `opened` (`choose.OpenedLink`) is None if it failed."""

    peer: str
    number: int
    scratch: list[int]
    opened: Any
    failure: str


def open_link(shared: Shared, handle: bytes, scratch: list[int]) -> choose.OpenedLink:
    """Open the best link to the memory of that handle; `scratch`: blocks that the trial may overwrite.

    Raises:
        MelldError: no link is possible.
        msgspec.ValidationError, OSError, RuntimeError: a bad handle, or an error of the system or torch.
    """
    if shared.lines is not None:
        return shared.lines.open(handle, scratch)
    if shared.memory is None:
        raise TransportFailed("links", "this worker's KV memory cannot be shared")
    return choose.open_best(handle, shared.memory.region, shared.memory.layout, scratch, shared.agent)


class Links:
    """The links by sibling.  `wake` passes a fact to the engine thread; `say` a message to the daemon."""

    def __init__(
        self,
        shared: Shared,
        rules: CopyRules,
        residency: Residency,
        wake: Callable[[Any], None],
        say: Callable[[Any], None],
    ) -> None:
        self._shared = shared
        self._rules = rules
        self._residency = residency
        self._wake = wake
        self._say = say
        self._copies: dict[str, Copies] = {}
        self._numbers = itertools.count(1)
        self._tries: dict[str, int] = {}  # number of the latest try, by living sibling
        self._ended = threading.Event()

    def to(self, peer: str) -> Copies | None:
        """Return the copies over the link to this sibling, or None without a link."""
        return self._copies.get(peer)

    def open(self, peer: str, handle: bytes) -> None:
        """Start to open a link: `LinkTried` follows."""
        self._drop(peer)
        scratch = self._residency.borrow_scratch(TRIAL_BLOCKS)
        number = self._tries[peer] = next(self._numbers)
        _beside(f"open {peer}", lambda: self._try(peer, number, handle, scratch))

    def close(self, peer: str) -> None:
        """Close the link to a sibling whose process has ended, including one that is still being opened.

        Says so once no copy reads its memory: a link that is being opened reads only what no request uses.
        """
        self._drop(peer, lambda: self._say(wire.LinkClosed(peer)))

    def close_all(self) -> None:
        """Close all links: this worker dozes."""
        for peer in {*self._copies, *self._tries}:
            self._drop(peer)

    def _drop(self, peer: str, then: Callable[[], None] = lambda: None) -> None:
        self._tries.pop(peer, None)
        if (copies := self._copies.pop(peer, None)) is None:
            then()
            return

        def close() -> None:
            try:
                copies.close()
            except (MelldError, OSError, RuntimeError) as error:  # of unmapping: no copy is under way any longer
                log.warning("memory of %s was not unmapped: %s", peer, error)
            finally:
                then()

        _beside(f"close {peer}", close)

    def _try(self, peer: str, number: int, handle: bytes, scratch: list[int]) -> None:
        opened, failure = None, ""
        try:
            opened = open_link(self._shared, handle, scratch)
        except (MelldError, msgspec.ValidationError, OSError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
        self._wake(LinkTried(peer, number, scratch, opened, failure))

    def watch(self) -> None:
        """Arm `wait` for the next copy that ends."""
        self._ended.clear()

    def wait(self, deadline_s: float) -> None:
        """Wait until a copy has ended, or until the deadline."""
        self._ended.wait(deadline_s)

    def _copied(self, peer: str, done: CopyDone) -> None:
        if done.is_link_broken:
            self._say(wire.LinkOpened(peer=peer, failure=done.failure or ""))
        self._wake(done)
        self._ended.set()

    def tried(self, tried: LinkTried) -> None:
        """Use the link, unless that process of the sibling has ended since."""
        self._residency.return_scratch(tried.scratch)
        if self._tries.get(tried.peer) != tried.number:
            if tried.opened is not None:
                _beside(f"close {tried.peer}", tried.opened.link.close)
            return
        if tried.opened is None:
            self._say(wire.LinkOpened(peer=tried.peer, failure=tried.failure))
            return
        copied = functools.partial(self._copied, tried.peer)
        rules = self._rules
        puller = Puller(tried.opened.link, bytes_per_s=rules.bytes_per_s, checksum=rules.checksum)
        self._copies[tried.peer] = Copies(puller, copied, tried.peer)
        transport, bytes_per_s = tried.opened.transport, tried.opened.bytes_per_s
        self._say(wire.LinkOpened(peer=tried.peer, transport=transport, bytes_per_s=bytes_per_s))


def _beside(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
