"""The size classes of MELL and what each weighs in the proof of its competitive ratio.

Owns the limits between classes and the weights; knows nothing of workers or requests.  MELL, section VI.

    0 ....... C/8 ........ C/4 ........ C/3 ........ C/2 ........ C
      TINY          T            S            M            L
"""

import enum
from fractions import Fraction
from typing import Final

import msgspec


class SizeClass(enum.IntEnum):
    """The class of a size; each holds its upper limit.  TINY requests travel in groups, and a group counts as one T."""

    TINY = 0
    T = 1
    S = 2
    M = 3
    L = 4


TINY, T, S, M, L = SizeClass.TINY, SizeClass.T, SizeClass.S, SizeClass.M, SizeClass.L

FULL_SIXTHS: Final = 6
"""The weight of a worker that the counting argument calls full, in sixths: one L, two M, or three S."""

WEIGHT_SIXTHS: Final = {TINY: 0, T: 0, S: 2, M: 3, L: 6}


def weight(klass: SizeClass) -> Fraction:
    """The paper's weight function (Lemma 2): L 1, M 1/2, S 1/3, T 0."""
    return Fraction(WEIGHT_SIXTHS[klass], FULL_SIXTHS)


class Limits(msgspec.Struct, frozen=True):
    """The greatest whole number of bytes in each class, for workers of `capacity_bytes`."""

    capacity_bytes: int
    tiny_bytes: int
    t_bytes: int
    s_bytes: int
    m_bytes: int

    @classmethod
    def of(cls, capacity_bytes: int) -> "Limits":
        """The limits for a capacity.  Whole bytes: size > C/k exactly when size > floor(C/k)."""
        return cls(capacity_bytes, capacity_bytes // 8, capacity_bytes // 4, capacity_bytes // 3, capacity_bytes // 2)

    def class_of(self, kv_bytes: int) -> SizeClass:
        """The class of a size."""
        if kv_bytes <= self.tiny_bytes:
            return TINY
        if kv_bytes <= self.t_bytes:
            return T
        if kv_bytes <= self.s_bytes:
            return S
        return M if kv_bytes <= self.m_bytes else L

    def is_filled(self, free_bytes: int) -> bool:
        """Whether a worker with that much free is more than 75 % full, so that some T may not fit."""
        return 4 * free_bytes < self.capacity_bytes
