"""What is said over the control socket besides the status: operations, their answers, and errors.

Owns the shapes, without I/O.  An operation is `POST /<name>` with its Struct as JSON; its answer is another, or a
`ControlErrorBody` with an HTTP status of 400 or more.
"""

import datetime
import enum
from typing import Annotated, Literal

import msgspec

from melld.migrate.boundaries import Boundaries
from melld.migrate.snapshot import Via

CONTROL_SOCKET = "control.sock"
"""The control socket's name in the runtime directory."""


class Reload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read the configuration file again and apply what can be applied while running."""


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The new configuration is in force, as far as it can be."""

    applied: tuple[str, ...] = ()
    """Keys whose new values count from now on."""
    needs_restart: tuple[str, ...] = ()
    """Keys that have changed, whose old values count until the daemon is started again."""
    keys_added: int = 0
    keys_removed: int = 0
    """How many API keys are new, and how many count no more."""


class Migrate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move a running request to another worker, and leave it there until that drains or ends.

    Answered by `melld.driver.report.MoveReport`, or `AlreadyThere`.
    """

    request: str
    worker: str
    via: Via | None = None
    """None: its KV where that can be copied, else its tokens."""


class AlreadyThere(msgspec.Struct, frozen=True, kw_only=True):
    """The request runs on that worker: nothing had to be moved."""

    request: str
    worker: str
    pinned: bool
    """Whether it stays there from now on; not while it is about to leave, or the worker drains."""
    outcome: Literal["already_there"] = "already_there"


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a worker out of service: no new requests, running ones moved, then its process ends.  Answered by `Drained`.

    Said again, it tells how far that is, and may set another deadline.
    """

    worker: str
    wait: bool = False
    """Answer when it is drained, or cannot be at its deadline."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """What still runs there after so many seconds goes on elsewhere from its tokens.  None: it takes what it takes."""


class DrainOutcome(enum.StrEnum):
    """How far a drain is."""

    DRAINING = "draining"  # its requests are leaving, or its process is ending
    DRAINED = "drained"  # it has no process, and its device is free
    STUCK = "stuck"  # its deadline has passed, and a request is left that no other worker could ever hold
    RESUMED = "resumed"  # it was taken into service again before it was drained


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a worker's requests since its drain began."""

    worker: str
    outcome: DrainOutcome
    total_s: float
    """Since the drain began; once it is drained, until its process was gone."""
    moved: int
    """Requests that were moved while they ran."""
    ended: int
    """Requests that ended there, of themselves or because their client left."""
    restarted: int
    """Requests that go on elsewhere from their tokens, now or when there is room: at the deadline, or at its death."""
    left: int
    """Requests that are still there."""
    reason: str = ""
    """Why it is stuck."""

    def in_words(self) -> str:
        """For people."""
        parts = [f"{self.moved} moved", f"{self.ended} ended"]
        parts += [f"{self.restarted} to go on elsewhere from their tokens"] if self.restarted else []
        parts += [f"{self.left} left"] if self.left else []
        done = "," if self.outcome is DrainOutcome.DRAINING else f" after {self.total_s:.1f} s:"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.worker}: {self.outcome}{done} {', '.join(parts)}{why}"


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a worker into service again, and start its process if there is none.  Answered by `Resumed`."""

    worker: str


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker takes requests, once it is ready."""

    worker: str
    was_drained: bool
    """Whether it had been drained, or was being drained."""
    started: bool
    """Whether its process had to be started: it is ready when `melld status` says so."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The boundaries of migrations.  Answered by `Profiled`."""

    measure: bool = False
    """Measure them now, at most a minute, and save them; not while requests run."""


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """The boundaries that are in force, and where they come from."""

    boundaries: Boundaries
    """Links in bytes per epoch, prefill in tokens per epoch; what is not named has the defaults."""
    fingerprint: dict[str, str]
    """What they depend on: hardware, model, versions, settings."""
    file: str
    """Where they are saved."""
    measured_unix_s: float | None = None
    """When they were measured; null for the defaults."""
    took_s: float | None = None
    """How long that took."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def when(self) -> str:
        """When they were measured, for people."""
        if self.measured_unix_s is None:
            return "defaults: not measured on this machine"
        at = datetime.datetime.fromtimestamp(self.measured_unix_s, datetime.UTC)
        return f"measured {at:%Y-%m-%d %H:%M} UTC"

    def in_one_line(self) -> str:
        """For `melld status`."""
        limits = self.boundaries
        rates = [count / limits.epoch_s / 2**30 for row in limits.links.values() for count in row.values()]
        parts = [self.when]
        if rates:
            parts.append(f"links {min(rates):.2f} to {max(rates):.2f} GiB/s")
        if limits.prefill:
            alone = min(limits.prefill_tokens(worker, 0) for worker in limits.prefill)
            beside = min(limits.prefill_tokens(worker, 1) for worker in limits.prefill)
            per_epoch = f"{limits.epoch_s * 1e3:g} ms"
            parts.append(f"prefill for moves in {per_epoch}: {alone:,} tokens idle, {beside:,} beside a request")
        return "; ".join(parts)


class ControlErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why an operation was not done."""

    code: str
    """For programs: `config_error`, `unknown_operation`."""
    message: str
    """For people."""
