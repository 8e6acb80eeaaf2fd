"""How much of a worker's KV memory may be used while others take from its device.

Owns the rule.  Pure: readings are given to it.

    capacity = the bytes of its own blocks, less what others have taken from the device since it was ready

vLLM has taken the memory of its blocks when it starts, so nobody can take the blocks themselves.  But whoever takes the
rest of the device takes what the worker's steps need beside the blocks, and a device that is wanted by somebody else is
to be left before that hurts: capacity falls as they come, requests leave, and it rises again as they go.
"""

from melld.kvstore.device_reading import DeviceReading, DeviceState

STEPS = 64
"""A change of less than one part in so many of the whole is not told: drivers and tools come and go."""


class CapacityRule:
    """One worker's process: it has so many bytes in blocks of so many."""

    def __init__(self, own_bytes: int, block_bytes: int) -> None:
        self.own_bytes = own_bytes
        self.told_bytes = own_bytes
        self._block_bytes = block_bytes
        self._others_at_first_bytes: int | None = None

    def seen(self, reading: DeviceReading) -> int | None:
        """The new capacity if it is to be told; None if it is as told, or if the device does not say.

        Whole blocks, and never less than one: a capacity of nothing would mean that the worker is gone.
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

    def _matters(self, capacity_bytes: int) -> bool:
        whole = capacity_bytes == self.own_bytes
        return whole or abs(capacity_bytes - self.told_bytes) * STEPS >= self.own_bytes
