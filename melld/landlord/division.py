"""Divides a device's memory among models without configured sizes.

    memory = the weights of as many models as fit together + KV memory

Pure.  KV memory is lent if all models fit and each can share it; else each worker has an equal part of its own, such
that any that may be loaded together fit.
"""

from collections.abc import Sequence

import msgspec

from melld.landlord.granules import GRANULE_UNIT_BYTES

LEAST_PART = 0.05
"""Part of the device that each loaded model has for KV at least: else fewer are loaded together."""


class Division(msgspec.Struct, frozen=True):
    """`lent_bytes`: KV memory that all models share; or `own_bytes`: of each worker.

    `together`: how many of the models fit at once, whichever they are.
    """

    lent_bytes: int = 0
    own_bytes: int = 0
    together: int = 0

    @property
    def why_none_is_empty(self) -> str | None:
        """Say why a device has no free memory even once its workers have ended; None if it has."""
        if self.lent_bytes:
            return "these models lend each other GPU memory, which is free only when the daemon ends"
        return None

    def in_words(self, models: int) -> str:
        """Describe the choice, for `models` models."""
        if self.lent_bytes:
            return f"{self.lent_bytes / 2**20:,.0f} MiB of KV memory, which {models} models lend each other"
        each = f"each of {models} models has {self.own_bytes / 2**20:,.0f} MiB of KV memory"
        return f"{each}, {'all' if self.together == models else f'any {self.together} of them'} fit at a time"


def divide(memory_bytes: int, held_bytes: Sequence[int], *, lends: bool) -> Division:
    """Divide the memory; all parts are zero if no model fits.

    `held_bytes`: of each model, what a worker holds beside KV.  `lends`: every layer of every model allows it.
    """
    largest = sorted(held_bytes, reverse=True)
    least_bytes = int(LEAST_PART * memory_bytes)
    left = {count: memory_bytes - sum(largest[:count]) for count in range(1, len(largest) + 1)}
    together = max((count for count, rest in left.items() if rest >= count * least_bytes), default=0)
    if not together:
        return Division()
    if lends and together == len(largest):
        return Division(lent_bytes=_whole(left[together]), together=together)
    return Division(own_bytes=_whole(left[together] // together), together=together)


def _whole(nbytes: int) -> int:
    return nbytes // GRANULE_UNIT_BYTES * GRANULE_UNIT_BYTES
