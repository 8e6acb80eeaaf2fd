"""`melld status`: the daemon's state, as tables or JSON, once or live.

Owns the request and the exit codes.  Never lays anything out: `melld.cli.status_tables` does.
"""

import argparse
import time
from collections.abc import Iterator

import msgspec

from melld.cli import DONE
from melld.cli.asking import NO_ANSWER, daemon_of, describe, failed
from melld.control.client import ControlClient
from melld.control.status import SCHEMA, DaemonStatus

WATCH_INTERVAL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument(
        "--watch", action="store_true", help="keep updating until Ctrl-C or until the daemon exits (code 3)"
    )
    as_json = "JSON as in docs/status-schema.md; with --watch, one line per update"
    describe(parser, "Show the daemon's workers and requests.", "shown", "the daemon returned no status", as_json)


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and show its status; return the exit code."""
    show = _print_json if arguments.json else _print_tables
    try:
        show(_statuses(daemon_of(arguments), arguments.watch), arguments.watch)
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
    except NO_ANSWER as error:
        return failed("status", error)
    return DONE


def _decode(text: bytes) -> DaemonStatus:
    try:
        return msgspec.json.decode(text, type=DaemonStatus)
    except msgspec.ValidationError as error:
        why = f"the daemon's status does not match schema {SCHEMA}; it may be another version of melld ({error})"
        raise msgspec.ValidationError(why) from error


def _print_json(texts: Iterator[bytes], watch: bool) -> None:
    """Print all that the daemon sent, including fields that this program does not know."""
    for text in texts:
        print((text if watch else msgspec.json.format(text, indent=2)).decode(), flush=True)


def _print_tables(texts: Iterator[bytes], watch: bool) -> None:
    from rich.live import Live

    from melld.cli.status_tables import plain_console, status_view

    console = plain_console()
    if not watch or not console.is_terminal or console.is_dumb_terminal:
        for text in texts:
            console.print(status_view(_decode(text), console))
            console.file.flush()
        return
    first = _decode(next(texts))  # fails before the screen is cleared if there is no daemon
    view = status_view(first, console, console.height)
    with Live(view, console=console, screen=True, auto_refresh=False) as live:
        for text in texts:
            live.update(status_view(_decode(text), console, console.height), refresh=True)


def _statuses(client: ControlClient, watch: bool) -> Iterator[bytes]:
    """Yield the status: once, or every half second until the daemon goes away (`NoDaemon`)."""
    while True:
        began_s = time.monotonic()
        yield client.status()
        if not watch:
            return
        time.sleep(max(0.0, began_s + WATCH_INTERVAL_S - time.monotonic()))
