"""The segments that copies between devices share, derived from how the devices are connected.

Owns the names of the segments and the pairs that cross each.  Never measures a segment's bandwidth.

    devices below one switch, host bridge or memory node       share the way out of it, and the way into it
    pairs whose GPUs cannot read one another                   go through the host's memory, and share that
    CPU workers                                                share the host's memory
    pairs joined by NVLink                                     share nothing but their ports
    pairs on two machines                                      share the network of each
"""

from collections.abc import Mapping, Sequence

from melld.ids import WorkerId
from melld.kvstore.device_reading import GpuLink, Proximity
from melld.migrate.boundaries import Pair, Segment

HOST_MEMORY = "host memory"
PLACES = {
    Proximity.SAME_BOARD: "board",
    Proximity.ONE_SWITCH: "switch",
    Proximity.SWITCHES: "switches",
    Proximity.HOST_BRIDGE: "host bridge",
    Proximity.NUMA_NODE: "memory node",
}


def segments_of(
    devices: Mapping[WorkerId, str | None], joined: Mapping[tuple[str, str], GpuLink]
) -> tuple[Segment, ...]:
    """Return what copies between workers share; `devices`: the UUID of each one's GPU, or None of a CPU worker.

    `joined`: how the second of two GPUs reads the first one's memory.
    """
    gpus = [(worker, uuid) for worker, uuid in devices.items() if uuid is not None]
    links = {
        (one, other): joined.get((from_uuid, to_uuid), GpuLink())
        for one, from_uuid in gpus
        for other, to_uuid in gpus
        if from_uuid != to_uuid
    }
    return segments_of_cpus([worker for worker, uuid in devices.items() if uuid is None]) + segments_of_gpus(links)


def segments_of_cpus(workers: Sequence[WorkerId]) -> tuple[Segment, ...]:
    """Return the host's memory as the one segment of all pairs."""
    pairs = frozenset((one, other) for one in workers for other in workers if one != other)
    return _shared([Segment(name=HOST_MEMORY, pairs=pairs)])


def segments_of_gpus(links: Mapping[Pair, GpuLink]) -> tuple[Segment, ...]:
    """Return the segments of GPUs; `links[source, destination]`: how the destination reads the source's memory.

    If the driver does not tell how near two GPUs are, the farthest distance is assumed.
    """
    bus = {pair: link for pair, link in links.items() if not link.nvlink}
    staged = frozenset(pair for pair, link in bus.items() if link.peer_read is False)
    found = []
    for level, place in PLACES.items():
        for below in _below(bus, level):
            label = f"{place} of {', '.join(below)}"
            leaving = {pair for pair in bus if pair[0] in below and (pair[1] not in below or pair in staged)}
            entering = {pair for pair in bus if pair[1] in below and (pair[0] not in below or pair in staged)}
            found.append(Segment(name=f"{label}, out", pairs=frozenset(leaving)))
            found.append(Segment(name=f"{label}, in", pairs=frozenset(entering)))
    return _shared([*found, Segment(name=HOST_MEMORY, pairs=staged)])


def segments_of_machines(machines: Mapping[WorkerId, str]) -> tuple[Segment, ...]:
    """Return each machine's network, outgoing and incoming, as segments that its workers share."""
    found = []
    for name in dict.fromkeys(machines.values()):
        here = [worker for worker, machine in machines.items() if machine == name]
        leaving = [(one, other) for one in here for other, machine in machines.items() if machine != name]
        found.append(Segment(name=f"network of {name}, out", pairs=frozenset(leaving)))
        found.append(Segment(name=f"network of {name}, in", pairs=frozenset((b, a) for a, b in leaving)))
    return _shared(found)


def _below(links: Mapping[Pair, GpuLink], level: Proximity) -> list[list[WorkerId]]:
    """Return the groups of two or more devices that share an ancestor at that level."""
    groups: list[set[WorkerId]] = []
    for pair, link in links.items():
        if link.proximity is not None and link.proximity <= level:
            joined = [group for group in groups if not group.isdisjoint(pair)]
            groups = [group for group in groups if group not in joined] + [set(pair).union(*joined)]
    return sorted(map(sorted, groups))


def _shared(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments of several pairs, one per set of pairs: the nearest shared place is the narrowest."""
    first: dict[frozenset[Pair], Segment] = {}
    for segment in segments:
        if len(segment.pairs) > 1:
            first.setdefault(segment.pairs, segment)
    return tuple(first.values())
