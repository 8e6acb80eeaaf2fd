"""A filter that lets each migration command through once, and none after a later one.

Owns the newest command of each request.  Pure.  Moves have consecutive numbers, and so have the commands of one move:
so a command that arrives twice or too late is recognised, and changes nothing.
"""

import collections

REMEMBERED = 4096
"""Limit of requests; above it, those with the oldest commands are forgotten."""


class CommandOrder:
    """The newest commands that one worker has received."""

    def __init__(self) -> None:
        self._newest: collections.OrderedDict[str, tuple[int, int]] = collections.OrderedDict()

    def is_next(self, request: str, move: int, number: int) -> bool:
        """Return True, and record the command, if it is newer than all earlier ones of this request."""
        if (move, number) <= self._newest.get(request, (0, 0)):
            return False
        self._newest[request] = move, number
        self._newest.move_to_end(request)
        if len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return True
