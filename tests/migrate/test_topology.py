"""From where workers are to what their copies share."""

from melld.ids import WorkerId
from melld.migrate.topology import segments_of_machines

W = [WorkerId(f"w{number}") for number in range(4)]


def test_the_workers_of_a_machine_share_its_network() -> None:
    """Both ways; within a machine nothing goes over it."""
    machines = dict(zip(W, ("a", "a", "b", "c"), strict=True))
    found = {segment.name: segment.pairs for segment in segments_of_machines(machines)}
    assert found["network of a, out"] == {(one, other) for one in W[:2] for other in W[2:]}
    assert found["network of b, in"] == {(W[0], W[2]), (W[1], W[2]), (W[3], W[2])}
    assert segments_of_machines(dict.fromkeys(W, "")) == ()
