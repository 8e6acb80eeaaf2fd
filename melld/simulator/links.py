"""How long KV takes over the links between workers.

Owns when each part of a path is free.  One transfer at a time leaves a worker and one enters it; transfers from one
switch to another queue for the way out of the one and into the other, as long as each part needs for their bytes.
"""

import msgspec

from melld.migrate.snapshot import Via

GIB = 2**30
Part = tuple[int, str]
"""Of a worker or a switch, and which way."""


class LinkSettings(msgspec.Struct, frozen=True):
    """`bytes_per_s`: rate of a link between two workers, and of a worker's port.  `delay_s`: the fixed cost of a move.

    `ways`: what may be used; with both, the planner divides.  `prefill_share`: the part of a busy worker's time that
    may go into prefill for others; it is what their boundary of tokens is made from.
    `gpus_per_switch`: so many share the way out of their switch and into it, each of `switch_bytes_per_s`; None: no
    switch is a limit.  `consensus`: the planner knows what pairs share; without, it plans pair by pair.
    `kv_gap_s`, `tokens_gap_s`: what a client waits longer for the token after the hand-over.  `copy_cost_s`: decoding
    that both workers of a copy lose.  All three as measured (docs/benchmarks.md).
    """

    bytes_per_s: float
    delay_s: float = 0.0
    ways: tuple[Via, ...] = (Via.KV, Via.TOKENS)
    prefill_share: float = 0.1
    gpus_per_switch: int | None = None
    switch_bytes_per_s: float = 0.0
    consensus: bool = True
    kv_gap_s: float = 0.0055
    tokens_gap_s: float = 0.04
    copy_cost_s: float = 0.002

    def gap_s(self, via: Via) -> float:
        """The gap of a move that went this way."""
        return self.kv_gap_s if via is Via.KV else self.tokens_gap_s

    def path(self, source: int, destination: int) -> dict[Part, float]:
        """The parts of the path from worker to worker, and the rate of each."""
        parts: dict[Part, float] = {(source, "out"): self.bytes_per_s, (destination, "in"): self.bytes_per_s}
        if self.gpus_per_switch is not None:
            here, there = source // self.gpus_per_switch, destination // self.gpus_per_switch
            if here != there:
                parts |= {(here, "up"): self.switch_bytes_per_s, (there, "down"): self.switch_bytes_per_s}
        return parts


class Links:
    """When the parts of the paths are free."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._free_s: dict[Part, float] = {}

    def transfer(self, source: int, destination: int, kv_bytes: int, now_s: float) -> float:
        """When a transfer that is asked for now will be over; its path is taken for it."""
        parts = self.settings.path(source, destination)
        start_s = max(now_s, *(self._free_s.get(part, 0.0) for part in parts)) + self.settings.delay_s
        for part, bytes_per_s in parts.items():
            self._free_s[part] = start_s + kv_bytes / bytes_per_s
        return start_s + kv_bytes / min(parts.values())
