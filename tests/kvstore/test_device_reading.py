"""One reading for a worker with several devices."""

import pytest

from melld.kvstore.device_reading import DeviceReading, DeviceState, worst_of


def reading(name: str, others: int, state: DeviceState = DeviceState.OK) -> DeviceReading:
    """Return the reading of one of a worker's GPUs."""
    return DeviceReading(name=name, state=state, used_by_others_bytes=others, power_w=100.0)


@pytest.mark.parametrize(
    ("readings", "worst"),
    [
        ([reading("a", 5), reading("b", 7)], "b"),
        ([reading("a", 5), reading("b", 3)], "a"),
        ([reading("a", 9), reading("b", 0, DeviceState.LOST)], "b"),
    ],
)
def test_a_worker_has_the_room_of_its_fullest_gpu(readings: list[DeviceReading], worst: str) -> None:
    """Each rank needs the same blocks, so the one with the least room decides; power adds up."""
    found = worst_of(readings)
    assert (found.name, found.power_w) == (worst, 200.0)
