"""`melld why`: print a request's story, from the daemon or from a decision log."""

import argparse
import sys
from pathlib import Path

import msgspec

from melld.cli import DONE, FAILED
from melld.cli.asking import ask, describe
from melld.control.messages import AskStory
from melld.decisions.records import read
from melld.decisions.stories import Happened, Line, Story, stories_of
from melld.errors import MelldError
from melld.printable import printable, printable_all
from melld.scheduler.reasons import Reason

_REASONS = frozenset(Reason)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.add_argument("request", metavar="REQUEST", help="id, or part of it, of a running or recent request")
    parser.add_argument("--log", metavar="FILE", type=Path, help="read a decision log instead of querying the daemon")
    does = (
        "Print what happened to a request, when and why: waiting, placement, moves, end.  Times are in seconds since "
        "it arrived; #N is the event that triggered it, `step` in the decision log."
    )
    describe(parser, does, "done", "unknown request or unreadable log", "print the story as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the story; return the exit code."""
    if arguments.log is None:
        return ask("why", arguments, (AskStory(request=arguments.request), None), Story, in_words)
    try:
        with arguments.log.open("rb") as file:
            story = stories_of(read(file)).story(arguments.request)
    except (OSError, LookupError, TypeError, ValueError, MelldError) as error:
        print(f"melld why: {printable(str(error))}", file=sys.stderr)
        return FAILED
    text = msgspec.json.encode(printable_all(msgspec.to_builtins(story)))
    told = msgspec.json.decode(text, type=Story)
    print(msgspec.json.format(text, indent=2).decode() if arguments.json else in_words(told))
    return DONE


def in_words(story: Story) -> str:
    """Return the story as human-readable text."""
    end_s = story.lines[-1].at_s if story.lines else 0.0
    head = f"{story.request}: {'ended' if story.ended else 'running, last event'} {end_s:.3f} s after it arrived"
    lines = [f"{line.at_s:10.3f} s  {_what(line)}  ({_event(line)})" for line in story.lines]
    if story.left_out:
        lines.insert(1, f"{'':10}    {story.left_out} lines omitted")
    return "\n".join([head, *lines])


def _what(line: Line) -> str:
    way = f"{line.source} -> {line.worker}"
    by = f" by {line.via}" if line.via else ""
    took = f" in {line.took_s:.3f} s" if line.took_s is not None else ""
    match line.what:
        case Happened.PLACED:
            return f"placed on {line.worker}: {_sentence(line.reason)}"
        case Happened.PROMISED:
            return f"memory reserved on {line.worker}, while others move away"
        case Happened.MOVE_BEGAN:
            return f"move {way}{by} decided: {_sentence(line.reason)}"
        case Happened.MOVED:
            return f"moved {way}{by}{took}"
        case Happened.MOVE_CANCELLED:
            return f"move cancelled after {line.took_s or 0:.3f} s, stays on {line.worker}: {_sentence(line.reason)}"
        case Happened.DISPLACED:
            return f"displaced: {line.source} is gone; tokens so far are kept"
        case Happened.SUSPENDED:
            return f"suspended on {line.source}, tokens so far are kept: {_sentence(line.reason)}"
        case Happened.PREEMPTED:
            return f"preempted: {line.worker} ran out of blocks"
        case Happened.RESUMED:
            return f"resumed on {line.worker}: its client saw no token for {(line.pause_s or 0) * 1e3:.1f} ms"
    return f"{line.what}{': ' if line.reason else ''}{_sentence(line.reason)}"


def _sentence(reason: str) -> str:
    return Reason(reason).sentence if reason in _REASONS else reason


def _event(line: Line) -> str:
    cause = f", caused by #{line.cause}" if line.cause else ""
    return f"#{line.event} {line.event_in_words}{cause}"
