"""Delivers events to the scheduler, never in the middle of a change.

Owns the events that wait for the end of a change: a decision on the first of them would act on records that the rest
of the change is about to correct.  Workers lost in one change, as with their machine, are told as one event.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from melld.scheduler.events import AnyEvent, WorkerDown


class Notices:
    """The events of one fleet; `handle` takes each."""

    def __init__(self, handle: Callable[[AnyEvent], None]) -> None:
        self._handle = handle
        self._untold: list[AnyEvent] | None = None

    def tell(self, event: AnyEvent) -> None:
        """Deliver an event, at the end of the current change."""
        if self._untold is None:
            self._handle(event)
        else:
            self._untold.append(event)

    def tell_all(self, found: Iterable[AnyEvent]) -> None:
        """Deliver these events in order."""
        for event in found:
            self.tell(event)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Hold back the events of the block until its end, so that no decision sees half of a change.

        A block inside another one is part of its change.
        """
        if self._untold is not None:
            yield
            return
        untold: list[AnyEvent] = []
        self._untold = untold
        try:
            yield
        finally:
            self._untold = None
            self.tell_all(_joined(untold))


def _joined(untold: list[AnyEvent]) -> list[AnyEvent]:
    """Merge all losses of workers into the first one's place."""
    losses = [event for event in untold if isinstance(event, WorkerDown)]
    if len(losses) < 2:
        return untold
    first, *others = (worker for loss in losses for worker in loss.workers)
    whole = msgspec.structs.replace(losses[0], worker=first, others=tuple(others))
    rest = [event for event in untold if event is losses[0] or not isinstance(event, WorkerDown)]
    return [whole if event is losses[0] else event for event in rest]
