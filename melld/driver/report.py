"""A finished migration's report, log line and metrics."""

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from melld.ids import EventId
from melld.migrate.migration import Migration
from melld.migrate.snapshot import Via
from melld.migrate.table import Outcome

GAP_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """A migration from its start to its end."""

    move: int
    request: str
    cause: EventId
    """The event on which the move was decided: `step` in the decision log."""
    source: str
    destination: str
    via: Via
    outcome: Outcome
    reason: str
    """Why it was not committed; empty if it was."""
    rounds: int
    """Copies that moved blocks, including the last one after the freeze."""
    blocks: int
    copied_bytes: int
    copy_s: float
    """Seconds in which bytes moved."""
    total_s: float
    gap_s: float | None
    """Seconds between the last token before and the first one after, as the daemon saw them; null without any."""
    story: tuple[str, ...]

    def line(self) -> str:
        """Return the report as one line for the log."""
        gap = "" if self.gap_s is None else f", gap {self.gap_s * 1e3:.1f} ms"
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"move {self.move} of {self.request} ({self.source} -> {self.destination} via {self.via}, "
            f"event #{self.cause}): {self.outcome}{why}; {self.rounds} rounds, {self.blocks} blocks, "
            f"{self.copied_bytes} bytes in {self.copy_s * 1e3:.2f} ms{gap}; {'; '.join(self.story)}"
        )


def report_of(migration: Migration, gap_s: float | None) -> MoveReport:
    """Return the report of a migration that has ended."""
    wish, outcome = migration.wish, migration.outcome
    assert outcome is not None, migration.told()
    return MoveReport(
        move=wish.move,
        request=wish.request,
        cause=wish.cause,
        source=wish.source,
        destination=wish.destination,
        via=migration.via,
        outcome=outcome,
        reason=migration.reason,
        rounds=migration.rounds,
        blocks=migration.copied_blocks,
        copied_bytes=migration.copied_bytes,
        copy_s=migration.copy_s,
        total_s=migration.story[-1][0] - migration.began_s,
        gap_s=gap_s,
        story=migration.told(),
    )


class MoveMeters:
    """The metrics of migrations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ways = ["via"]
        self._ended = Counter("melld_migrations", "Finished migrations.", [*ways, "outcome"], registry=registry)
        self._bytes = Counter("melld_migration_bytes", "KV bytes copied.", registry=registry)
        self._copy_s = Counter("melld_migration_copy_seconds", "Seconds spent copying KV.", registry=registry)
        self._gap_s = Histogram(
            "melld_migration_gap_seconds",
            "Gap between a moved request's last token before and first token after the move.",
            ways,
            buckets=GAP_BUCKETS_S,
            registry=registry,
        )

    def ended(self, migration: Migration, outcome: Outcome) -> None:
        """Count a migration."""
        self._ended.labels(migration.via, outcome).inc()
        self._bytes.inc(migration.copied_bytes)
        self._copy_s.inc(migration.copy_s)

    def gap(self, via: Via, gap_s: float) -> None:
        """Count a client's gap."""
        self._gap_s.labels(via).observe(gap_s)
