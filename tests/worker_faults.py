"""Faults on demand: a worker that dies or stops at a named point of a migration, or whose copies arrive damaged.

Owns the points, and the wrappers that are put around the worker's methods in a process that the nursery forks.  The
worker's own code knows nothing of them.  `MELLD_FAULTS` names a directory: a file `WORKER.POINT.SIGNAL` in it
(`w1.attached.KILL`) is removed, and its signal sent to the process, when the worker reaches the point.  While a file
`slow` is there, no worker makes more than twenty steps in a second, and fewer by the seconds for each running request
that the file holds.  While `WORKER.dropping.HOLD` is there, the worker keeps its weights, as it goes to doze, until it
is wanted.
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "MELLD_FAULTS"
AHEAD = "MELLD_AHEAD"
"""Set, these workers schedule asynchronously, as on a GPU (`async_on_cpu`): `MELLD_AHEAD=1 make chaos`."""
POINTS = (
    "starting",  # any worker: it is about to load the model
    "described",  # source: it has looked, and not said so
    "reserved",  # destination: room is taken, and not said so
    "warmed",  # destination: the blocks are computed, room is not taken yet
    "copying",  # destination: a pull is about to begin
    "copied",  # destination: it has ended, and this is not said
    "following",  # source: it looks for a chunk, or the first token, of a prompt that is followed
    "followed",  # source: there is a chunk, and this is not said
    "freezing",  # source: about to freeze
    "frozen",  # source: frozen, and not said so
    "attaching",  # destination: about to attach, its last blocks are there
    "attached",  # destination: attached, and not said so
    "releasing",  # source: committed, its blocks are still its own
    "thawing",  # source: rolled back, not yet going on
    "cancelling",  # destination: rolled back, its room not yet given back
    "suspending",  # any worker: it hears of a suspension, and has not aborted the request
    "aborted",  # any worker: requests are gone here, and this is not said
    "resumed",  # any worker: a request goes on here by its tokens, and has not been stepped
    "step",  # any step of the engine
)
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "ABRT": signal.SIGABRT}
PULLED = "pulled"
"""The point, on a copying thread, between the copy of a piece and its check, for the `DAMAGES`."""
DAMAGES = ("CORRUPT", "SHORT")
SLOW, SLOW_STEP_S = "slow", 0.075


@contextlib.contextmanager
def slowed(directory: Path, decode_s: float = 0.0) -> Iterator[None]:
    """Slow these workers' streams to the pace of a large model, so that an observer finds them running, however late.

    `decode_s`: by how much each running request makes a step longer.
    """
    (directory / SLOW).write_text(str(decode_s))
    try:
        yield
    finally:
        (directory / SLOW).unlink(missing_ok=True)


class FaultPoints:
    """The fault points of one worker."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._directory = directory
        self._worker = worker

    def reach(self, point: str) -> None:
        """Suffer the fault set for this point, if any."""
        for name, number in SIGNALS.items():
            if self.take(point, name):
                os.kill(os.getpid(), number)

    def in_step(self, running: int) -> None:
        """Take as long as a large model would, while all are to be slow."""
        with contextlib.suppress(FileNotFoundError):
            time.sleep(SLOW_STEP_S + running * float((self._directory / SLOW).read_text() or 0.0))

    def hold(self, point: str, until: Callable[[], bool]) -> None:
        """Stay at this point until that holds, or as long as it is to be held there."""
        while not until() and (self._directory / f"{self._worker}.{point}.HOLD").exists():
            time.sleep(0.01)

    def take(self, point: str, fault: str) -> bool:
        """Return True, once, if this fault is set for this point."""
        try:
            (self._directory / f"{self._worker}.{point}.{fault}").unlink()
        except FileNotFoundError:
            return False
        return True


class SpoiltLink:
    """A link (`transports.transport.Link`) whose copies arrive corrupted, or short, when the fault points say so."""

    def __init__(self, link: Any, region: Any, take: Callable[[str, str], bool]) -> None:
        """Wrap `link`; `region` is the bytes (uint8) of our allocation."""
        self._link = link
        self._region = region
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Any:
        """Copy, then flip a bit in the last block, or leave the last block out."""
        end = len(source_blocks) - self._take(PULLED, "SHORT")
        landed = self._link.begin(source_blocks[:end], destination_blocks[:end])
        landed()
        if self._take(PULLED, "CORRUPT"):
            layout = self._link.destination
            self._region[layout.chunk_offsets[0] + destination_blocks[-1] * layout.block_stride_bytes] ^= 1
        return landed


def inject(directory: Path) -> None:
    """Wrap a worker's methods, by name, in this process, so that it reaches the fault points."""
    from vllm.v1.engine.core import EngineCore

    from melld.engine.worker import links
    from melld.engine.worker.leavers import Leavers
    from melld.engine.worker.main import EngineLoop
    from melld.engine.worker.migration import Moves
    from melld.engine.worker.residency.arrival import Arrivals
    from melld.engine.worker.residency.residency import Residency
    from melld.engine.worker.residency.warm import Warmers
    from melld.engine.worker.residency.weights import CpuWeights
    from melld.engine.worker.writer import Writer
    from melld.migrate import messages as say
    from tests.engine.worker.residency.async_on_cpu import schedule_asynchronously

    known: list[FaultPoints] = []

    def reach(point: str) -> None:
        known[0].reach(point)

    def started(_worker: Any, spec: Any, _connection: Any) -> None:
        known.append(FaultPoints(directory, spec.worker))
        reach("starting")

    told = {
        say.RequestDescribed: "described",
        say.RoomReserved: "reserved",
        say.RequestFrozen: "frozen",
        say.RequestAttached: "attached",
    }

    def said(_writer: Any, message: Any, *_: Any) -> None:
        if isinstance(message, say.RequestDescribed) and message.facts.in_prompt and message.number > 1:
            reach("followed")
        if (point := told.get(type(message))) is not None:
            reach(point)

    _wrap(EngineLoop, "__init__", before=started)
    _wrap(Writer, "say", before=said)
    _wrap(EngineLoop, "_abort", before=lambda _, abort: reach("suspending") if abort.may_return else None)
    _wrap(Leavers, "_follow", before=lambda *_, **__: reach("following"))
    _wrap(Leavers, "_freeze", before=lambda *_: reach("freezing"))
    _wrap(Leavers, "_release", before=lambda *_: reach("releasing"))
    _wrap(Leavers, "_thaw", before=lambda *_: reach("thawing"))
    _wrap(Moves, "_cancel", before=lambda *_: reach("cancelling"))
    _wrap(Leavers, "after_report", after=lambda _: reach("step"))
    if AHEAD in os.environ:
        _wrap(EngineCore, "__init__", before=lambda _, config, *_a, **_n: schedule_asynchronously(config))
    for step in ("step", "step_with_batch_queue"):
        _wrap(EngineCore, step, before=lambda engine: known[0].in_step(len(engine.scheduler.running)))
    _wrap(Warmers, "take", after=lambda warmed: reach("warmed") if warmed else None)
    _wrap(Arrivals, "copy_began", before=lambda *_: reach("copying"))
    _wrap(Arrivals, "copy_ended", after=lambda _: reach("copied"))
    _wrap(CpuWeights, "drop", before=lambda _, is_wanted: known[0].hold("dropping", is_wanted))
    _wrap(Residency, "abort", after=lambda _: reach("aborted"))
    _wrap(Arrivals, "attach", before=lambda *_: reach("attaching"))
    _wrap(Residency, "attach_unreserved", after=lambda _: reach("resumed"))

    open_link = links.open_link

    def spoilt(shared: Any, handle: bytes, scratch: list[int]) -> Any:
        opened = open_link(shared, handle, scratch)
        if shared.memory is None:  # its ranks copy
            return opened
        link = SpoiltLink(opened.link, shared.memory.region, known[0].take)
        return type(opened)(opened.transport, link, opened.bytes_per_s)

    links.open_link = spoilt


def _wrap(
    owner: type, name: str, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    """Call `before` with the method's arguments, and `after` with its result."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*given: Any, **named: Any) -> Any:
        if before is not None:
            before(*given, **named)
        result = method(*given, **named)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, wrapped)
