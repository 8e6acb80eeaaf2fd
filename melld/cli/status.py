"""`melld status`: the daemon's state, as tables or JSON, once or live.

Owns the request and the exit codes.  Never lays anything out: `melld.cli.status_tables` does.
"""

import argparse
import os
import time
from collections.abc import Iterator

import msgspec

from melld.cli import DONE
from melld.cli.asking import NO_ANSWER, describe, failed
from melld.cli.config_flags import daemon_directories
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
    try:
        client = ControlClient(daemon_directories(arguments, os.environ))
        if arguments.json:
            _print_json(client, watch=arguments.watch)
        elif arguments.watch:
            _watch(client)
        else:
            _print_tables(client)
        return DONE
    except NO_ANSWER as error:
        return failed("status", error)


def _decode(text: bytes) -> DaemonStatus:
    try:
        return msgspec.json.decode(text, type=DaemonStatus)
    except msgspec.ValidationError as error:
        why = f"the daemon's status does not match schema {SCHEMA}; it may be another version of melld ({error})"
        raise msgspec.ValidationError(why) from error


def _print_json(client: ControlClient, *, watch: bool) -> None:
    """Print all that the daemon sent, including fields that this program does not know."""
    if not watch:
        print(msgspec.json.format(client.status(), indent=2).decode())
        return
    try:
        for text in _again_and_again(client):
            print(text.decode(), flush=True)
    except KeyboardInterrupt:
        return


def _print_tables(client: ControlClient) -> None:
    from melld.cli.status_tables import plain_console, status_view

    console = plain_console()
    console.print(status_view(_decode(client.status()), console))


def _watch(client: ControlClient) -> None:
    from rich.live import Live

    from melld.cli.status_tables import plain_console, status_view

    console = plain_console()
    first = _decode(client.status())  # fails before the screen is cleared if there is no daemon
    try:
        if not console.is_terminal or console.is_dumb_terminal:
            for text in _again_and_again(client):
                console.print(status_view(_decode(text), console))
                console.file.flush()
            return
        view = status_view(first, console, console.height)
        with Live(view, console=console, screen=True, auto_refresh=False) as live:
            for text in _again_and_again(client):
                live.update(status_view(_decode(text), console, console.height), refresh=True)
    except KeyboardInterrupt:
        return


def _again_and_again(client: ControlClient) -> Iterator[bytes]:
    """Yield a status every half second, until the daemon goes away (`NoDaemon`)."""
    while True:
        began_s = time.monotonic()
        yield client.status()
        time.sleep(max(0.0, began_s + WATCH_INTERVAL_S - time.monotonic()))
