"""A link's ways to copy: uses the fastest that works, and the next one when it fails.

Owns the choice.  Knows no device: a way is a function that begins a copy.  Whatever a way raises, the next one is
tried: compilers, drivers and runtimes each have their own exceptions.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from melld.migrate.transports.transport import TransportFailed, Wait

log = logging.getLogger("melld.worker")
SAMPLES = 5

Begin = Callable[[Sequence[int], Sequence[int]], Wait]
"""Begins to copy these blocks of the peer into those of ours."""


class Copiers:
    """The ways of one link by name: in the order given until they are measured, then the fastest first."""

    def __init__(self, link: str, ways: Mapping[str, Begin], clock: Callable[[], float] = time.perf_counter) -> None:
        self._link = link
        self._clock = clock
        self._ways = dict(ways)
        self._failures: list[str] = []
        self.measured_s: dict[str, float] = {}
        """Median time of each way, as last measured."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the ways that have not failed, the one in use first."""
        return tuple(self._ways)

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """Begin to copy by the first way that works; if it fails later, the next one copies again.

        Raises:
            TransportFailed: no way is left.  The returned wait may raise it too.
        """
        while self._ways:
            name, way = next(iter(self._ways.items()))
            with self._dropping(name):
                landed = way(source_blocks, destination_blocks)
                return lambda: self._land(name, landed, source_blocks, destination_blocks)
        raise TransportFailed(self._link, "; ".join(self._failures) or "no way to copy")

    def keep_true(self, is_true: Callable[[Begin], bool]) -> None:
        """Drop each way that delivers wrong bytes: some drivers offer peer access that they do not have.

        Raises:
            TransportFailed: no way is left.
        """
        for name, way in list(self._ways.items()):
            with self._dropping(name):
                if not is_true(way):
                    raise TransportFailed(name, "it delivers different bytes from the peer's")
        if not self._ways:
            raise TransportFailed(self._link, "; ".join(self._failures))

    def measure(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """Time each way on these blocks and use the fastest from now on.  The first copy compiles and is not timed.

        Raises:
            TransportFailed: no way is left.
        """
        for name, way in list(self._ways.items()):
            with self._dropping(name):
                seconds = [self._time(way, source_blocks, destination_blocks) for _ in range(SAMPLES + 1)]
                self.measured_s[name] = statistics.median(seconds[1:])
        if not self._ways:
            raise TransportFailed(self._link, "; ".join(self._failures))
        self._ways = {name: self._ways[name] for name in sorted(self._ways, key=self.measured_s.__getitem__)}

    def _land(self, name: str, landed: Wait, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        with self._dropping(name):
            landed()
            return
        self.begin(source_blocks, destination_blocks)()

    def _time(self, way: Begin, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> float:
        began_s = self._clock()
        way(source_blocks, destination_blocks)()
        return self._clock() - began_s

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop the way if its use raises anything, so that the caller can try the next one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  compilers, drivers and torch each raise their own
            if self._ways.pop(name, None) is not None:
                self._failures.append(f"{name}: {type(error).__name__}: {error}")
                log.warning(
                    "%s: %s failed and is no longer used: %s: %s", self._link, name, type(error).__name__, error
                )
