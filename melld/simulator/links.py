"""How long KV takes over the links between workers.

Owns when each worker's link is free.  One transfer at a time leaves a worker and one enters it.
"""

import msgspec

from melld.migrate.snapshot import Via

GIB = 2**30


class LinkSettings(msgspec.Struct, frozen=True):
    """`bytes_per_s`: rate of a link between two workers.  `delay_s`: the fixed cost of any migration.

    `ways`: what may be used; with both, the planner divides.  `prefill_share`: the part of a busy worker's time that
    may go into prefill for others; it is what their boundary of tokens is made from.
    """

    bytes_per_s: float
    delay_s: float = 0.0
    ways: tuple[Via, ...] = (Via.KV, Via.TOKENS)
    prefill_share: float = 0.1


class Links:
    """When the ends of the links are free."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._free_s: dict[tuple[int, str], float] = {}

    def kv_end_s(self, source: int, destination: int, kv_bytes: int, now_s: float) -> float:
        """When a transfer that is asked for now would be over."""
        start_s = max(now_s, self._free_s.get((source, "out"), 0.0), self._free_s.get((destination, "in"), 0.0))
        return start_s + self.settings.delay_s + kv_bytes / self.settings.bytes_per_s

    def take(self, source: int, destination: int, end_s: float) -> None:
        """Both ends are busy until then."""
        self._free_s[source, "out"] = end_s
        self._free_s[destination, "in"] = end_s
