"""The segments that copies between workers share: the network of each machine, on the way out of it and into it.

Owns the names of the segments and the pairs that cross each.  Never measures a segment's bandwidth.
"""

from collections.abc import Mapping

from melld.ids import WorkerId
from melld.migrate.boundaries import Pair, Segment


def segments_of_machines(machines: Mapping[WorkerId, str]) -> tuple[Segment, ...]:
    """Return the segments of these workers' machines that several pairs share; of those of the same pairs one."""
    first: dict[frozenset[Pair], Segment] = {}
    for name in dict.fromkeys(machines.values()):
        here = [worker for worker, machine in machines.items() if machine == name]
        leaving = frozenset((one, other) for one in here for other, machine in machines.items() if machine != name)
        entering = frozenset((other, one) for one, other in leaving)
        for way, pairs in (("out", leaving), ("in", entering)):
            if len(pairs) > 1:
                first.setdefault(pairs, Segment(name=f"network of {name}, {way}", pairs=pairs))
    return tuple(first.values())
