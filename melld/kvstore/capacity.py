"""Decides how much of a worker's KV memory may be used while other programs use its device's memory.

Pure: it gets readings and never takes them.

    capacity = bytes of the worker's blocks - what other programs have taken since the worker was ready

vLLM allocates all its blocks at the start, so no other program can take the blocks themselves.  But a program that
takes the rest of the device takes the memory that the worker's steps need.  Requests should leave before that happens:
capacity falls as other programs arrive and rises again as they go.
"""

from melld.kvstore.device_reading import DeviceReading, DeviceState

STEPS = 64
"""Changes below 1/STEPS of the whole are not reported: drivers and tools come and go."""


def is_filled(reading: DeviceReading, needed_part: float) -> bool:
    """Return True if other programs leave less of the device than this part of its memory."""
    known = reading.total_bytes, reading.used_by_others_bytes
    if reading.state is not DeviceState.OK or known[0] is None or known[1] is None:
        return False
    return known[0] - known[1] < needed_part * known[0]


class CapacityRule:
    """Usable KV capacity of one worker process."""

    def __init__(self, own_bytes: int, block_bytes: int) -> None:
        self.own_bytes = own_bytes
        self.told_bytes = own_bytes
        self._block_bytes = block_bytes
        self._others_at_first_bytes: int | None = None

    def seen(self, reading: DeviceReading) -> int | None:
        """Return the new capacity if it must be reported, else None (no change, or no reading).

        The capacity is in whole blocks and at least one.
        """
        others_bytes = reading.used_by_others_bytes
        if reading.state is not DeviceState.OK or others_bytes is None:
            return None
        if self._others_at_first_bytes is None:
            self._others_at_first_bytes = others_bytes
        taken_bytes = max(0, others_bytes - self._others_at_first_bytes)
        blocks = max(self.own_bytes - taken_bytes, self._block_bytes) // self._block_bytes
        capacity_bytes = blocks * self._block_bytes if taken_bytes else self.own_bytes
        if capacity_bytes == self.told_bytes or not self._matters(capacity_bytes):
            return None
        self.told_bytes = capacity_bytes
        return capacity_bytes

    @property
    def gives_way(self) -> bool:
        """Return True while other programs hold some of the worker's memory."""
        return self.told_bytes < self.own_bytes

    def _matters(self, capacity_bytes: int) -> bool:
        whole = capacity_bytes == self.own_bytes
        return whole or abs(capacity_bytes - self.told_bytes) * STEPS >= self.own_bytes
