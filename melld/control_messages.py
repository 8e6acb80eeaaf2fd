"""What is said over the control socket besides the status: operations, their answers, and errors.

Owns the shapes, without I/O.  An operation is `POST /<name>` with its Struct as JSON; its answer is another, or a
`ControlErrorBody` with an HTTP status of 400 or more.
"""

import msgspec

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


class Migrate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move a running request to another worker.  Answered by `melld.migrate.executor_report.MoveReport`."""

    request: str
    worker: str
    via: Via | None = None
    """None: its KV where that can be copied, else its tokens."""


class ControlErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why an operation was not done."""

    code: str
    """For programs: `config_error`, `unknown_operation`."""
    message: str
    """For people."""
