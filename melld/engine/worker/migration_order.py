"""Which commands of migrations a worker still obeys: each once, and none that a later one has overtaken.

Owns the newest command known of each request.  Pure.  Moves are numbered through, and so are the commands of one move:
with that a command that comes twice, or too late, is known for what it is and changes nothing.
"""

import collections

REMEMBERED = 4096
"""Requests; of more, those that were commanded longest ago are forgotten."""


class CommandOrder:
    """The commands that one worker has been given."""

    def __init__(self) -> None:
        self._newest: collections.OrderedDict[str, tuple[int, int]] = collections.OrderedDict()

    def is_next(self, request: str, move: int, number: int) -> bool:
        """Whether this command of this request is newer than all before it; it is then the newest."""
        if (move, number) <= self._newest.get(request, (0, 0)):
            return False
        self._newest[request] = move, number
        self._newest.move_to_end(request)
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return True
