"""What travels with a request when it changes its worker, and the words for where it stands.

Owns the frozen facts alone: no vLLM, no torch, no I/O.  `engine/residency` makes and consumes them; the daemon passes
them on as bytes and needs to read no more of them than the request's id and sizes.
"""

import enum


class Phase(enum.StrEnum):
    """Where a request stands on its worker, as the worker's own scheduler sees it."""

    WAITING = "waiting"  # holds no computed tokens: queued, or preempted
    PREFILLING = "prefilling"  # part of its known tokens is computed
    DECODING = "decoding"  # one token a step
