"""Messages on the control socket besides the status: operations, their answers, and errors.

Owns the shapes, without I/O.  An operation is `POST /<name>` with its Struct as JSON; its answer is a Struct too, or a
`ControlErrorBody` with an HTTP status of 400 or more.
"""

import enum
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from melld.migrate.snapshot import Via

CONTROL_SOCKET = "control.sock"
"""File name of the control socket in the runtime directory."""


class Reload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read the configuration file again and apply what can be applied while running."""


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The new configuration is in force, as far as it can be applied while running."""

    applied: tuple[str, ...] = ()
    """Keys whose new values apply from now on."""
    needs_restart: tuple[str, ...] = ()
    """Changed keys whose old values apply until the daemon restarts."""
    keys_added: int = 0
    keys_removed: int = 0
    """Numbers of API keys added and removed."""
    models_added: tuple[str, ...] = ()
    models_removed: tuple[str, ...] = ()
    """Models by name; a changed one is in both.  Running requests of a removed one end first."""


class Migrate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move a running request to another worker, and keep it there until that worker drains or ends.

    Answered by `melld.driver.report.MoveReport`, or `AlreadyThere`.
    """

    request: str
    worker: str
    via: Via | None = None
    """None: copy its KV if possible, else recompute from its tokens."""
    after_first_token: bool = False
    """Copy its KV while its prompt is computed, and hand it over after its first token, whatever `via` says."""


class AskStory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tell a request's story.  Answered by `melld.decisions.stories.Story`."""

    request: str


class AlreadyThere(msgspec.Struct, frozen=True, kw_only=True):
    """The request already runs on that worker: no move was needed."""

    request: str
    worker: str
    pinned: bool
    """True if it stays there from now on; False while it is about to leave or the worker drains."""
    outcome: Literal["already_there"] = "already_there"


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a worker out of service: no new requests, running ones moved, then its process ends.  Answered by `Drained`.

    Repeated, it reports the progress, and may set another deadline.
    """

    worker: str
    wait: bool = False
    """Answer only once the worker is drained, or is stuck at its deadline."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds after which the remaining requests are recomputed elsewhere from their tokens.  None: no deadline."""


class DrainOutcome(enum.StrEnum):
    """The state of a drain."""

    DRAINING = "draining"  # its requests are leaving, or its process is ending
    DRAINED = "drained"  # the worker has no process, and its device is free
    STUCK = "stuck"  # the deadline has passed, and a request is left that no other worker can ever hold
    RESUMED = "resumed"  # the worker was taken into service again before it was drained


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drain so far: the counts of requests that were moved, ended, restarted, or remain."""

    worker: str
    outcome: DrainOutcome
    total_s: float
    """Time since the drain began; once drained, the time until its process was gone."""
    moved: int
    """Requests moved while they ran."""
    ended: int
    """Requests that ended there: finished, or their client left."""
    restarted: int
    """Requests recomputed elsewhere from their tokens, now or when there is room: at the deadline, or at its death."""
    left: int
    """Requests still on the worker."""
    reason: str = ""
    """Reason for STUCK."""

    @classmethod
    def of_all(cls, name: str, each: Sequence["Drained"]) -> "Drained":
        """Return the drains of several workers as one, under this name."""
        best_first = (DrainOutcome.DRAINED, DrainOutcome.RESUMED, DrainOutcome.DRAINING, DrainOutcome.STUCK)
        worst = max(each, key=lambda one: best_first.index(one.outcome))
        return cls(
            worker=name,
            outcome=worst.outcome,
            total_s=max(one.total_s for one in each),
            moved=sum(one.moved for one in each),
            ended=sum(one.ended for one in each),
            restarted=sum(one.restarted for one in each),
            left=sum(one.left for one in each),
            reason=worst.reason,
        )

    def in_words(self) -> str:
        """Return the report as one line of text."""
        parts = [f"{self.moved} moved", f"{self.ended} ended"]
        parts += [f"{self.restarted} to resume elsewhere from their tokens"] if self.restarted else []
        parts += [f"{self.left} left"] if self.left else []
        done = "," if self.outcome is DrainOutcome.DRAINING else f" after {self.total_s:.1f} s:"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.worker}: {self.outcome}{done} {', '.join(parts)}{why}"


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a worker into service again, and start its process if there is none.  Answered by `Resumed`."""

    worker: str


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker takes requests again, once it is ready."""

    worker: str
    was_drained: bool
    """True if it had been drained, or was being drained."""
    started: bool
    """True if its process had to be started; `melld status` says when it is ready."""


class Lend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lend devices to a program for as long as the connection lasts.

    The request's body is this message on one line, and goes on without a word until the loan ends.  Answered by lines
    of `Loan`, the last of which is LENT or REFUSED.
    """

    command: str
    pid: int
    user: str
    """The program, for others to see; the process that keeps the connection; and whose it is."""
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    devices: tuple[str, ...] = ()
    """Lend these, such as `cuda:1`, and no others; then `count` does not matter."""
    even_last: bool = False
    """Lend the last worker in service, too."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long to wait for devices that can be lent, if there are none now."""
    held_s: float | None = None
    """The program has had `devices` for so long, by a loan whose connection broke.  None: it is a new loan."""

    @property
    def borrower(self) -> str:
        """Return the borrower, in words."""
        return f"`{self.command}` (pid {self.pid}, {self.user})"


class LoanStep(enum.StrEnum):
    """How far a loan is."""

    WAITING = "waiting"  # no device can be lent now
    EMPTYING = "emptying"  # requests leave the workers, or their processes end
    LENT = "lent"  # the devices are free
    REFUSED = "refused"  # none could be lent in the time that the borrower would wait


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a loan."""

    step: LoanStep
    devices: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    """Of its GPUs."""
    workers: tuple[str, ...] = ()
    left: int = 0
    moved: int = 0
    """Requests that are still there, and that were moved away."""
    reason: str = ""
    """Reason for WAITING and REFUSED."""


class Renew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start another daemon that takes over from this one.

    Answered by lines of `Renewal`, the last of which is not UNDER_WAY; a client that leaves before calls it off.
    """


class RenewalStep(enum.StrEnum):
    """How far a renewal is."""

    UNDER_WAY = "under way"
    RENEWED = "renewed"  # the new daemon is serving
    KEPT = "kept"  # the old one serves on
    STOPPED = "stopped"  # the old one was told to stop: neither serves


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a renewal."""

    step: RenewalStep
    pid: int
    """Of the new daemon."""
    told: str
    """What happens, in words; of KEPT, the reason."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load a model, and reply once it can serve.  Answered by `melld.control.status.ModelStatus`."""

    model: str
    path: str = ""
    """Of one that is not configured, served by that name until it is unloaded or the daemon ends; empty: it is."""


class Unload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unload a model, and answer once its memory is free.  Answered by `melld.control.status.ModelStatus`."""

    model: str
    now: bool = False
    """End its running requests with an error.  False: wait for their ends."""


class ControlErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why an operation was refused."""

    code: str
    """Code for programs: `config_error`, `unknown_operation`."""
    message: str
    """For people."""
