"""The ways in which one link can copy: the fastest that works, and the next one when it fails.

Owns the choice.  Knows no device: a way is a function that begins a copy.  What a way raises is no reason to give up
while another is left: compilers, drivers and runtimes each have exceptions of their own.
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
"""Begin to copy these blocks of the peer into those of ours."""


class Copiers:
    """The ways of one link, by name, best first until they have been measured."""

    def __init__(self, link: str, ways: Mapping[str, Begin], clock: Callable[[], float] = time.perf_counter) -> None:
        self._link = link
        self._clock = clock
        self._ways = dict(ways)
        self._failures: list[str] = []
        self.measured_s: dict[str, float] = {}
        """The median time of each way, as last measured."""

    @property
    def names(self) -> tuple[str, ...]:
        """What has not failed, the way that is used first."""
        return tuple(self._ways)

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """Begin to copy by the first way that does not fail; should it fail later, the next one copies it anew.

        Raises:
            TransportFailed: no way is left.  So may the answer.
        """
        while self._ways:
            name, way = next(iter(self._ways.items()))
            with self._dropping(name):
                landed = way(source_blocks, destination_blocks)
                return lambda: self._land(name, landed, source_blocks, destination_blocks)
        raise TransportFailed(self._link, "; ".join(self._failures) or "there is no way to copy")

    def keep_true(self, is_true: Callable[[Begin], bool]) -> None:
        """Drop each way whose bytes arrive as others: some drivers offer access to a peer that they do not have.

        Raises:
            TransportFailed: no way is left.
        """
        for name, way in list(self._ways.items()):
            with self._dropping(name):
                if not is_true(way):
                    raise TransportFailed(name, "the bytes that arrive are not the peer's")
        if not self._ways:
            raise TransportFailed(self._link, "; ".join(self._failures))

    def measure(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """Time each way on these blocks, and use the fastest from now on.  The first copy compiles: it is not timed.

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
        """Use a way; should it fail, whatever it raises, drop it and go on: the next one may do."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  compilers, drivers and torch each raise their own
            if self._ways.pop(name, None) is not None:
                self._failures.append(f"{name}: {type(error).__name__}: {error}")
                log.warning("%s no longer copies by %s: %s: %s", self._link, name, type(error).__name__, error)
