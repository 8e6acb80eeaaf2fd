"""Links measured together: what pairs share is found, and what they do not share is not made up."""

import asyncio

from melld.driver.links import measure_links
from melld.ids import WorkerId
from melld.migrate.boundaries import Pair, Segment

W = [WorkerId(f"w{number}") for number in range(4)]
ALONE = 100
ACROSS = frozenset((a, b) for a in W[:2] for b in W[2:])
OUT = Segment(name="switch", nbytes=1, pairs=ACROSS)
NOTHING = Segment(name="wide", nbytes=1, pairs=frozenset((b, a) for a, b in ACROSS))


class Machine:
    """Copies that run at once share a switch of 120, and the port out of w3, which carries 150."""

    def __init__(self) -> None:
        self.running: set[Pair] = set()
        self.most = 0
        self.broken: set[Pair] = set()

    async def measure(self, pair: Pair, seconds: float) -> int | None:
        assert 0 < seconds <= 0.3
        self.running.add(pair)
        await asyncio.sleep(0)
        self.most = max(self.most, len(self.running))
        over_switch = sum(one in ACROSS for one in self.running)
        from_w3 = sum(one[0] == W[3] for one in self.running)
        rate = min(ALONE, 120 // over_switch if pair in ACROSS else ALONE, 150 // from_w3 if pair[0] == W[3] else ALONE)
        await asyncio.sleep(0)
        self.running.discard(pair)
        return None if pair in self.broken else rate


async def test_a_shared_switch_is_found_by_using_both_links_at_once() -> None:
    """Measured one by one, two links over one switch seem to carry twice what they do."""
    found = await measure_links(W, [OUT, NOTHING], Machine().measure)
    assert found.links[W[0]] == dict.fromkeys(W[1:], ALONE)
    assert [(segment.name, segment.nbytes) for segment in found.segments] == [("switch", 120)]


async def test_ports_carry_what_they_carried_together() -> None:
    """A worker that sends to three at once sends each less, where its port is the limit."""
    found = await measure_links(W, [], Machine().measure)
    assert (found.ports_out[W[3]], found.ports_in[W[0]]) == (150, 300)


async def test_a_link_that_cannot_be_measured_says_nothing_of_what_it_shares() -> None:
    """The rest is measured all the same."""
    machine = Machine()
    machine.broken = {(W[0], W[1])}
    found = await measure_links(W, [OUT], machine.measure)
    assert W[1] not in found.links[W[0]]
    assert found.segments[0].nbytes == 120
    assert machine.running == set()


async def test_two_workers_have_one_link_each_way_and_the_memory_between() -> None:
    """What two CPU workers share is their memory: both directions at once."""
    both = Segment(name="host memory", nbytes=1, pairs=frozenset([(W[0], W[1]), (W[1], W[0])]))
    machine = Machine()
    found = await measure_links(W[:2], [both], machine.measure)
    assert (found.ports_out, found.ports_in, found.segments, machine.most) == ({}, {}, (), 2)
