"""Knows which workers are near each other: those of one machine, between which KV can be copied.

To a far worker a request moves by its tokens, which are computed anew there.  Owns no worker; decides nothing.
"""

from collections.abc import Callable

from melld.scheduler.roster import Roster
from melld.scheduler.state import Duty, Worker


class Distances:
    """Distances between the workers of one roster.  With `kv_everywhere` none is far."""

    def __init__(self, roster: Roster, room_bytes: Callable[[Worker], int], kv_everywhere: bool) -> None:
        self._roster = roster
        self._room_bytes = room_bytes
        self._kv_everywhere = kv_everywhere

    @property
    def some_are_far(self) -> bool:
        """Return True if there are workers far from each other."""
        return len(self._roster.machines) > 1 and not self._kv_everywhere

    def is_far(self, one: Worker, other: Worker) -> bool:
        """Return True if KV cannot be copied between the two."""
        return one.machine != other.machine and not self._kv_everywhere

    def neighbours(self, worker: Worker) -> list[Worker]:
        """Return the other active workers of its machine, the tightest first; none where no worker is far."""
        if not self.some_are_far:
            return []
        known = self._roster.machines.get(worker.machine, {}).values()
        near = [one for one in known if one.state is Duty.ACTIVE and one is not worker]
        return sorted(near, key=lambda one: (self._room_bytes(one), one.order))
