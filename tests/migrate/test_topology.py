"""From how devices are connected to what their copies share."""

from melld.ids import WorkerId
from melld.kvstore.device_reading import GpuLink, Proximity
from melld.migrate.boundaries import Pair
from melld.migrate.topology import HOST_MEMORY, segments_of, segments_of_cpus, segments_of_gpus, segments_of_machines

W = [WorkerId(f"w{number}") for number in range(4)]
BELOW = {W[0]: 0, W[1]: 0, W[2]: 1, W[3]: 1}
"""Two switches with two GPUs each."""


def joined(nvlink: bool = False, peer_read: bool = True, far: Proximity = Proximity.MACHINE) -> dict[Pair, GpuLink]:
    return {
        (one, other): GpuLink(
            proximity=Proximity.ONE_SWITCH if BELOW[one] == BELOW[other] else far, nvlink=nvlink, peer_read=peer_read
        )
        for one in W
        for other in W
        if one != other
    }


def crossing(links: dict[Pair, GpuLink]) -> dict[str, frozenset[Pair]]:
    return {segment.name: segment.pairs for segment in segments_of_gpus(links)}


def test_gpus_below_one_switch_share_its_uplink() -> None:
    """The paper's Fig. 9: two sources, one switch, one destination behind it."""
    found = crossing(joined())
    assert found["switch of w0, w1, out"] == {(a, b) for a in W[:2] for b in W[2:]}
    assert found["switch of w0, w1, in"] == {(b, a) for a in W[:2] for b in W[2:]}
    assert not any((W[0], W[1]) in pairs for pairs in found.values())  # within the switch nothing is shared


def test_equal_sets_of_pairs_are_counted_once() -> None:
    """A switch below its own host bridge is one uplink, not three."""
    assert len(crossing(joined())) == 2  # out of the one is into the other


def test_nested_switches_each_have_an_uplink() -> None:
    """Two switches below one host bridge, and a second bridge beside it."""
    links = joined(far=Proximity.HOST_BRIDGE)
    beside = [WorkerId("w4"), WorkerId("w5")]
    for one in beside:
        for other in [*W, *beside]:
            if one != other:
                near = Proximity.HOST_BRIDGE if other in beside else Proximity.MACHINE
                links[one, other] = links[other, one] = GpuLink(proximity=near, nvlink=False, peer_read=True)
    found = crossing(links)
    assert (W[0], beside[0]) in found["switch of w0, w1, out"] & found["host bridge of w0, w1, w2, w3, out"]
    assert (W[0], W[2]) not in found["host bridge of w0, w1, w2, w3, out"]


def test_copies_through_the_host_share_its_memory_and_the_uplink() -> None:
    """Without peer access even neighbours meet in the host's memory."""
    found = crossing(joined(peer_read=False))
    assert found[HOST_MEMORY] == {(a, b) for a in W for b in W if a != b}
    assert (W[0], W[1]) in found["switch of w0, w1, out"] & found["switch of w0, w1, in"]


def test_nvlink_uses_no_bus_switch() -> None:
    """Directly connected devices are limited by their ports alone."""
    assert segments_of_gpus(joined(nvlink=True)) == ()


def test_an_unknown_topology_implies_no_shared_segment() -> None:
    """An unknown distance joins no two GPUs."""
    assert segments_of_gpus(dict.fromkeys(joined(), GpuLink())) == ()


def test_cpu_workers_share_one_memory() -> None:
    """Both directions of a pair, too."""
    (segment,) = segments_of_cpus(W[:2])
    assert (segment.name, segment.pairs) == (HOST_MEMORY, {(W[0], W[1]), (W[1], W[0])})
    assert segments_of_cpus(W[:1]) == ()


def test_a_machine_s_workers_share_its_network() -> None:
    """Both ways; copies within a machine do not use it."""
    machines = dict(zip(W, ("a", "a", "b", "c"), strict=True))
    found = {segment.name: segment.pairs for segment in segments_of_machines(machines)}
    assert found["network of a, out"] == {(one, other) for one in W[:2] for other in W[2:]}
    assert found["network of b, in"] == {(W[0], W[2]), (W[1], W[2]), (W[3], W[2])}
    assert segments_of_machines(dict.fromkeys(W, "")) == ()


def test_workers_share_what_their_devices_share() -> None:
    """GPUs by how they are connected, CPU workers the memory, and two workers of one GPU nothing."""
    devices = {W[0]: "GPU-a", W[1]: "GPU-b", W[2]: None, W[3]: None}
    far = GpuLink(proximity=Proximity.MACHINE, nvlink=False, peer_read=False)
    found = {one.name: one.pairs for one in segments_of(devices, {("GPU-a", "GPU-b"): far, ("GPU-b", "GPU-a"): far})}
    pairs = {frozenset({(W[0], W[1]), (W[1], W[0])}), frozenset({(W[2], W[3]), (W[3], W[2])})}
    assert set(found.values()) <= pairs
    assert segments_of({W[0]: "GPU-a", W[1]: "GPU-a"}, {}) == ()
