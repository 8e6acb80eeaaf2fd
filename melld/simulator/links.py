"""Model of the links between workers: how long a KV transfer takes.

Owns the time at which each part of a path is free.  One transfer at a time leaves a worker and one enters it;
transfers between switches queue for the way out of one and into the other, each part for as long as its bytes take.
As in the daemon, a link between two workers has only so many moves under way; further ones wait.
"""

import collections
import heapq

import msgspec

from melld.migrate.snapshot import Via

GIB = 2**30
Part = tuple[int, str]
"""Number of a worker or a switch, and the direction."""


class LinkSettings(msgspec.Struct, frozen=True):
    """Rates and costs of the links between workers.

    `bytes_per_s`: rate of a link between two workers, and of a worker's port.  `delay_s`: fixed cost of a move.
    `ways`: the ways allowed; with both, the planner divides.  `prefill_share`: share of a busy worker's time that may
    go into prefill for moves; the boundary of tokens follows from it.
    `gpus_per_switch`: GPUs that share the way out of their switch and into it, each of `switch_bytes_per_s`; None:
    switches are no limit.  `kv_between_machines`: else a move to another machine goes by tokens.
    `most_moves`: under way at once between two workers, `[migration] max_moves_per_link`.
    `kv_gap_s`, `tokens_gap_s`: extra wait for the first token after the hand-over.  `copy_cost_s`: decoding time that
    both workers of a copy lose.  All three as measured (docs/benchmarks.md).
    """

    bytes_per_s: float
    delay_s: float = 0.0
    ways: tuple[Via, ...] = (Via.KV, Via.TOKENS)
    prefill_share: float = 0.1
    gpus_per_switch: int | None = None
    switch_bytes_per_s: float = 0.0
    kv_between_machines: bool = True
    most_moves: int = 4
    kv_gap_s: float = 0.0055
    tokens_gap_s: float = 0.04
    copy_cost_s: float = 0.002

    def gap_s(self, via: Via) -> float:
        """Return the client's extra wait after a move by this way."""
        return self.kv_gap_s if via is Via.KV else self.tokens_gap_s

    def path(self, source: int, destination: int) -> dict[Part, float]:
        """Return the parts of the path between two workers, with the rate of each."""
        parts: dict[Part, float] = {(source, "out"): self.bytes_per_s, (destination, "in"): self.bytes_per_s}
        if self.gpus_per_switch is not None:
            here, there = source // self.gpus_per_switch, destination // self.gpus_per_switch
            if here != there:
                parts |= {(here, "up"): self.switch_bytes_per_s, (there, "down"): self.switch_bytes_per_s}
        return parts


class SimulatedLinks:
    """Times at which the parts of the paths are free."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._free_s: dict[Part, float] = {}
        self._ends_s: collections.defaultdict[tuple[int, int], list[float]] = collections.defaultdict(list)
        """Of the last moves between two workers, at most `most_moves` of them."""

    def transfer(self, source: int, destination: int, kv_bytes: int, now_s: float) -> float:
        """Book the path for a transfer requested now; return when it will end."""
        parts, ends_s = self.settings.path(source, destination), self._ends_s[source, destination]
        turn_s = heapq.heappop(ends_s) if len(ends_s) >= self.settings.most_moves else 0.0
        start_s = max(now_s, turn_s, *(self._free_s.get(part, 0.0) for part in parts))
        for part, bytes_per_s in parts.items():
            self._free_s[part] = start_s + kv_bytes / bytes_per_s
        end_s = start_s + kv_bytes / min(parts.values()) + self.settings.delay_s
        heapq.heappush(ends_s, end_s)
        return end_s
