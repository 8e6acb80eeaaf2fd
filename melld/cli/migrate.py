"""`melld migrate`: move a running request to another worker, and report the result.

Owns the request and the wording.
"""

import argparse
from typing import Any

from melld.cli.asking import ask, describe
from melld.cli.config_flags import add_flag
from melld.control.messages import Migrate
from melld.migrate.snapshot import Via

DEADLINE_S = 300.0
_HELD = "it stays there until the worker is drained or exits, or until you migrate it again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument("request", metavar="REQUEST", help="request id from `melld status`, or part of it")
    parser.add_argument("worker", metavar="WORKER", help="destination worker")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--via", choices=[str(via) for via in Via], help="copy the KV or recompute the tokens")
    early = "copy KV while the prompt is being computed, and hand the request over after its first token"
    add_flag(way, "--after-first-token", early, action="store_true")
    describe(
        parser,
        "Move a running request to another worker without interrupting its stream.  It stays there until that worker "
        "is drained or exits, or until you migrate it again; naming its current worker pins it there.",
        "moved or already there",
        "not moved",
        "the full report as JSON",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon, wait, and print the report; return the exit code."""
    via = Via(arguments.via) if arguments.via else None
    names = {"request": arguments.request, "worker": arguments.worker}
    asked = Migrate(**names, via=via, after_first_token=arguments.after_first_token)
    return ask("migrate", arguments, (asked, DEADLINE_S), dict[str, Any], in_words, was_moved)


def was_moved(report: dict[str, Any]) -> bool:
    """Return True if the request now runs on the worker asked for."""
    return report["outcome"] in ("committed", "already_there")


def in_words(report: dict[str, Any]) -> str:
    """Return the report as one line of text."""
    if report["outcome"] == "already_there":
        held = f", {_HELD}" if report["pinned"] else ""
        return f"{report['request']} is already on {report['worker']}{held}"
    way = f"{report['request']}: {report['source']} -> {report['destination']} via {report['via']}"
    if report["outcome"] != "committed":
        return f"{way}: not moved: {report['outcome']} ({report['reason']})"
    gap_s = report["gap_s"]
    gap = "no token before or after the move" if gap_s is None else f"{gap_s * 1e3:.1f} ms between two tokens"
    copied = f"{report['blocks']} blocks ({report['copied_bytes'] / 2**20:.1f} MiB) in {report['rounds']} rounds"
    return (
        f"{way}: moved in {report['total_s'] * 1e3:.0f} ms; {copied}, {report['copy_s'] * 1e3:.1f} ms; {gap}; {_HELD}"
    )
