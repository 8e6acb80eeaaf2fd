"""What happened to each request, and why: its arrival, its waits, its workers, its moves, its end.

Owns a bounded memory of stories, folded from the records of the decision log, whoever gives them: the daemon as it
makes them, or a log read from a disk.  Pure: nothing is decided here, and nothing asked.

    Recorder ──records of one event──► Stories ──story──► `melld why`
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from melld.decisions.records import Record, is_decision
from melld.errors import UnknownRequest
from melld.ids import RequestId

MOST_LINES = 100
"""Lines that a story keeps: its first one, and the latest."""


class Happened(enum.StrEnum):
    """What a line of a story tells."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    PLACED = "placed"
    MOVE_BEGAN = "move began"
    MOVED = "moved"
    MOVE_CANCELLED = "move cancelled"
    DISPLACED = "displaced"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"
    SENT_AWAY = "sent away"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line."""

    at_s: float
    """Since the request arrived."""
    what: Happened
    event: int
    """The id of the event on which it happened: `step` in the decision log."""
    event_in_words: str
    cause: int = 0
    """The event that brought that one about; 0 where it came from outside."""
    reason: str = ""
    """What was decided for, or why it failed."""
    worker: str = ""
    """Where the request is from then on; of a move that begins, where it is to go."""
    source: str = ""
    via: str = ""
    took_s: float | None = None
    """From the decision to move until the move's end."""
    pause_s: float | None = None
    """How long the client saw no token."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One request's story, so far or to its end."""

    request: str
    ended: bool
    lines: tuple[Line, ...]
    left_out: int = 0
    """Lines after the first that are not kept."""


class _OpenStory:
    """A story as it grows."""

    def __init__(self, arrived: Record) -> None:
        self.request = str(arrived["request"])
        self.arrived_s = float(arrived["at"])
        self.first: Line | None = None
        self.latest: deque[Line] = deque(maxlen=MOST_LINES - 1)
        self.count = 0
        self.worker = ""
        self.move: Record | None = None  # the decision, while the move is under way

    def add(self, line: Line) -> None:
        self.count += 1
        if self.first is None:
            self.first = line
        else:
            self.latest.append(line)

    def told(self, ended: bool) -> Story:
        lines = (*filter(None, [self.first]), *self.latest)
        return Story(request=self.request, ended=ended, lines=lines, left_out=self.count - len(lines))


class Stories:
    """The stories of all requests that live, and of the last `kept` that ended."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._live: dict[RequestId, _OpenStory] = {}
        self._ended: OrderedDict[RequestId, _OpenStory] = OrderedDict()

    def story(self, name: str) -> Story:
        """The story of the request of that id, or of the only one whose id contains it; those that live come first.

        Raises:
            UnknownRequest: none is known, or several could be meant.
        """
        for known in (self._live, self._ended):
            alike = [name] if name in known else [request for request in known if name in request]
            if len(alike) > 1:
                raise UnknownRequest(name, alike)
            if alike:
                return known[RequestId(alike[0])].told(ended=known is self._ended)
        raise UnknownRequest(name, [])

    def move_of(self, request: RequestId) -> Record | None:
        """The decision to move the request, while that move is under way."""
        story = self._live.get(request)
        return story.move if story is not None else None

    def take(self, records: Sequence[Record]) -> None:
        """Fold in the records of one event."""
        event = ""
        for record in records:
            if record["kind"] in _PASSED_OVER:
                continue
            event = event or event_in_words(records)
            if record["kind"] == "worker":
                if record["capacity_bytes"] == 0:
                    self._worker_gone(record, event)
            else:
                self._request(record, event)

    def _request(self, record: Record, event: str) -> None:
        request = RequestId(str(record["request"]))
        if record["kind"] == "arrive":
            self._live[request] = _OpenStory(record)
        story = self._live.get(request)
        if story is None:
            return
        line = _line(story, record, event)
        if line is not None:
            story.add(line)
        if record["kind"] == "finish":
            del self._live[request]
            self._ended[request] = story
            while len(self._ended) > self._kept:
                self._ended.popitem(last=False)

    def _worker_gone(self, record: Record, event: str) -> None:
        worker = str(record["worker"])
        for story in self._live.values():
            if story.worker == worker:
                story.worker, story.move = "", None
                story.add(_plain(story, record, event, Happened.DISPLACED, source=worker))
            elif story.move is not None and story.move["destination"] == worker:
                story.add(_move_ended(story, record, event, committed=False, reason="its destination is gone"))


_PASSED_OVER = frozenset(
    {"scheduler", "grow", "epoch", "share", "activate", "retire", "drain", "resume", "wake", "steady", "ask"}
)


def stories_of(records: Iterable[Record]) -> Stories:
    """The stories that a whole log tells."""
    stories = Stories(kept=2**63)
    for _, found in groupby(records, key=lambda record: record.get("step")):
        stories.take(list(found))
    return stories


def event_in_words(records: Sequence[Record]) -> str:
    """The event whose records these are."""
    fact = next((record for record in records if not is_decision(record)), None)
    if fact is None:  # a simulation's log does not tell its epochs
        return "the period of re-planning began"
    kind, request, worker = fact["kind"], fact.get("request"), fact.get("worker")
    match kind:
        case "worker" if fact["capacity_bytes"] == 0:
            return f"{worker} is gone"
        case "worker" if "machine" in fact:
            return f"{worker} is ready"
        case "moved":
            return f"the move of {request} {'is done' if fact['outcome'] == 'committed' else 'was cancelled'}"
        case "ask":
            return f"an operator wants {request} on {fact['destination']}"
    return _EVENTS[str(kind)].format(request=request, worker=worker)


_EVENTS = {
    "arrive": "{request} arrived",
    "grow": "requests have grown",
    "finish": "{request} ended",
    "preempt": "{worker} pushed {request} out",
    "resumed": "{request} goes on",
    "epoch": "the period of re-planning began",
    "worker": "{worker} may run more or less than before",
    "share": "the requests on {worker} share more or less than before",
    "steady": "{worker} has worked for long enough since it died",
    "wake": "{worker} wakes sooner or later than before",
    "drain": "an operator takes {worker} out of service",
    "resume": "an operator takes {worker} back into service",
}


def _line(story: _OpenStory, record: Record, event: str) -> Line | None:
    """What the record adds to the story of its request."""
    reason = str(record.get("cause", ""))
    match record["kind"]:
        case "arrive":
            return _plain(story, record, event, Happened.ARRIVED)
        case "queue":
            return _plain(story, record, event, Happened.QUEUED, reason=reason)
        case "place":
            story.worker = str(record["worker"])
            return _plain(story, record, event, Happened.PLACED, reason=reason, worker=story.worker)
        case "move":
            story.move = record
            way = {"source": record["source"], "worker": record["destination"], "via": record["via"]}
            return _plain(story, record, event, Happened.MOVE_BEGAN, reason=reason, **way)
        case "moved" if story.move is not None:
            return _move_ended(story, record, event, record["outcome"] == "committed", reason)
        case "preempt":
            return _plain(story, record, event, Happened.PREEMPTED, worker=story.worker)
        case "resumed":
            return _plain(story, record, event, Happened.RESUMED, worker=story.worker, pause_s=record["pause_s"])
        case "finish" if reason:
            return _plain(story, record, event, Happened.SENT_AWAY, reason=reason)
        case "finish":
            return _plain(story, record, event, Happened.FINISHED, source=story.worker)
    return None


def _move_ended(story: _OpenStory, record: Record, event: str, committed: bool, reason: str) -> Line:
    move, story.move = story.move, None
    assert move is not None, record
    took_s = float(record["at"]) - float(move["at"])
    if committed:
        story.worker = str(move["destination"])
    what = Happened.MOVED if committed else Happened.MOVE_CANCELLED
    way = {"source": move["source"], "worker": story.worker, "via": record.get("via", move["via"])}
    return _plain(story, record, event, what, reason=reason, took_s=took_s, **way)


def _plain(story: _OpenStory, record: Record, event: str, what: Happened, **rest: Any) -> Line:
    at_s = float(record["at"]) - story.arrived_s
    ids = {"event": record.get("step", 0), "cause": record.get("cause_step", 0)}
    return Line(at_s=at_s, what=what, event_in_words=event, **ids, **rest)
