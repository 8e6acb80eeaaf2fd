"""The size classes of MELL and their weights in the proof of its competitive ratio.

Owns the limits between classes and the weights; knows nothing of workers or requests.  MELL, section VI.

    0 ....... C/8 ........ C/4 ........ C/3 ........ C/2 ........ C
      TINY          T            S            M            L
"""

import enum
from typing import Final

import msgspec


class SizeClass(enum.IntEnum):
    """Class of a size; each includes its upper limit.  TINY requests move in groups, and a group counts as one T."""

    TINY = 0
    T = 1
    S = 2
    M = 3
    L = 4


TINY, T, S, M, L = SizeClass.TINY, SizeClass.T, SizeClass.S, SizeClass.M, SizeClass.L

FULL_SIXTHS: Final = 6
"""Weight of a full worker in the counting argument, in sixths: one L, two M, or three S."""

WEIGHT_SIXTHS: Final = {TINY: 0, T: 0, S: 2, M: 3, L: 6}
"""By the paper's Lemma 2: L 1, M 1/2, S 1/3, T 0."""


class Limits(msgspec.Struct, frozen=True):
    """Upper limit of each class in whole bytes, for workers of `capacity_bytes`."""

    capacity_bytes: int
    tiny_bytes: int
    t_bytes: int
    s_bytes: int
    m_bytes: int

    @classmethod
    def of(cls, capacity_bytes: int) -> "Limits":
        """Return the limits for a capacity.  Whole bytes suffice: size > C/k exactly when size > floor(C/k)."""
        return cls(capacity_bytes, capacity_bytes // 8, capacity_bytes // 4, capacity_bytes // 3, capacity_bytes // 2)

    def class_of(self, kv_bytes: int) -> SizeClass:
        """Return the class of a size."""
        if kv_bytes <= self.tiny_bytes:
            return TINY
        if kv_bytes <= self.t_bytes:
            return T
        if kv_bytes <= self.s_bytes:
            return S
        return M if kv_bytes <= self.m_bytes else L

    def is_filled(self, free_bytes: int) -> bool:
        """Return True if a worker with that much free is more than 75 % full, so that some T may not fit."""
        return 4 * free_bytes < self.capacity_bytes
