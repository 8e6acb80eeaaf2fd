"""The story of each request: when it arrived, waited, was placed, moved and ended, and why.

Owns a bounded memory of stories, made from the records of the decision log: of the running daemon, or from a file.
Pure.

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
from melld.scheduler.reasons import Reason

MOST_LINES = 100
"""Lines that a story keeps: the first one and the latest."""


class Happened(enum.StrEnum):
    """Kind of a story's line."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    PROMISED = "promised"
    PLACED = "placed"
    SUSPENDED = "suspended"
    MOVE_BEGAN = "move began"
    MOVED = "moved"
    MOVE_CANCELLED = "move cancelled"
    DISPLACED = "displaced"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"
    SENT_AWAY = "sent away"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a story."""

    at_s: float
    """Seconds since the request arrived."""
    what: Happened
    event: int
    """The id of the event on which it happened: `step` in the decision log."""
    event_in_words: str
    cause: int = 0
    """The event that caused that one; 0 if it came from outside."""
    reason: str = ""
    """The decision's reason, or why it failed."""
    worker: str = ""
    """The request's worker from then on; where a move that starts goes, or where room is promised."""
    source: str = ""
    via: str = ""
    took_s: float | None = None
    """Seconds from the decision to move to the move's end."""
    pause_s: float | None = None
    """Seconds in which the client saw no token."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """A request's story so far, or to its end."""

    request: str
    ended: bool
    lines: tuple[Line, ...]
    left_out: int = 0
    """Number of lines after the first that are not kept."""


class _OpenStory:
    """A growing story."""

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
    """The stories of all unfinished requests, and of the last `kept` that ended."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._live: dict[RequestId, _OpenStory] = {}
        self._ended: OrderedDict[RequestId, Story] = OrderedDict()
        self._lent_to: dict[str, str] = {}
        """The borrower of each worker's device."""

    def story(self, name: str) -> Story:
        """Return the story of the request of that id, or of the only one whose id contains it, unfinished ones first.

        Raises:
            UnknownRequest: no request matches, or several do.
        """
        is_whole = name in self._live or name in self._ended
        for known in (self._live, self._ended):
            alike = [request for request in known if (name == request if is_whole else name in request)]
            if len(alike) > 1:
                raise UnknownRequest(name, alike)
            if alike:
                story = known[alike[0]]
                return story if isinstance(story, Story) else story.told(ended=False)
        raise UnknownRequest(name, [])

    def ended(self) -> list[Story]:
        """Return the stories of requests that have ended, the oldest first."""
        return list(self._ended.values())

    def keep(self, stories: Iterable[Story]) -> None:
        """Add stories that have ended; drop the oldest beyond those that are kept."""
        self._ended |= {RequestId(story.request): story for story in stories}
        while len(self._ended) > self._kept:
            self._ended.popitem(last=False)

    def take(self, records: Sequence[Record]) -> None:
        """Add the records of one event."""
        event = ""
        for record in records:
            if record["kind"] in ("drain", "resume"):
                self._lent_to[str(record["worker"])] = str(record.get("lent_to", ""))
            if record["kind"] in _PASSED_OVER:
                continue
            event = event or event_in_words(records)
            if record["kind"] == "worker":
                if "gone" in record:
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
        if record.get("cause") == Reason.DRAIN and (borrower := self._lent_to.get(str(record.get("source")))):
            record = {**record, "cause": f"its worker's device is being lent to {borrower}"}
        line = _line(story, record, event)
        if line is not None:
            story.add(line)
        if record["kind"] == "finish":
            del self._live[request]
            self.keep([story.told(ended=True)])

    def _worker_gone(self, record: Record, event: str) -> None:
        worker = str(record["worker"])
        for story in self._live.values():
            if story.worker == worker:
                story.worker, story.move = "", None
                story.add(_plain(story, record, event, Happened.DISPLACED, source=worker))
            elif story.move is not None and story.move["destination"] == worker:
                story.add(_move_ended(story, record, event, committed=False, reason="its destination is gone"))


_PASSED_OVER = frozenset(
    {"scheduler", "epoch", "ask", "grow", "share", "pace"}
    | {"activate", "retire", "role", "drain", "resume", "wake", "steady"}
)


def stories_of(records: Iterable[Record]) -> Stories:
    """Return the stories of a whole log."""
    stories = Stories(kept=2**63)
    for _, found in groupby(records, key=lambda record: record.get("step")):
        stories.take(list(found))
    return stories


def event_in_words(records: Sequence[Record]) -> str:
    """Describe the event whose records these are."""
    fact: Record = next((record for record in records if not is_decision(record)), {"kind": "epoch"})
    kind, request, worker = fact["kind"], fact.get("request"), fact.get("worker")
    match kind:
        case "worker" if "gone" in fact:
            gone = [str(record["worker"]) for record in records if record["kind"] == "worker"]
            return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        case "worker" if "machine" in fact:
            return f"{worker} is ready"
        case "moved":
            return f"the move of {request} was {'committed' if fact['outcome'] == 'committed' else 'cancelled'}"
        case "ask":
            return f"an operator asked to move {request} to {fact['destination']}"
        case "drain" if "lent_to" in fact:
            return f"{worker} is being drained to lend its device"
    return _EVENTS[str(kind)].format(request=request, worker=worker)


_EVENTS = {
    "arrive": "{request} arrived",
    "grow": "requests have grown",
    "finish": "{request} ended",
    "preempt": "{worker} preempted {request}",
    "resumed": "{request} resumed",
    "epoch": "an epoch started",
    "worker": "the limits of {worker} changed",
    "share": "the requests on {worker} share a different amount of KV",
    "pace": "{worker} reported its step times",
    "steady": "{worker} has run long enough since its last death",
    "wake": "the wake time of {worker} changed",
    "drain": "an operator took {worker} out of service",
    "resume": "an operator returned {worker} to service",
}


def _line(story: _OpenStory, record: Record, event: str) -> Line | None:
    """Return the line that the record adds to its request's story, or None."""
    reason = str(record.get("cause", ""))
    match record["kind"]:
        case "arrive":
            return _plain(story, record, event, Happened.ARRIVED)
        case "queue":
            return _plain(story, record, event, Happened.QUEUED, reason=reason)
        case "promise":
            return _plain(story, record, event, Happened.PROMISED, reason=reason, worker=record["worker"])
        case "suspend":
            story.worker = ""
            return _plain(story, record, event, Happened.SUSPENDED, reason=reason, source=record["worker"])
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
    record = {"cause_step": move.get("step", 0)} | record  # a lost worker's record does not name the move
    return _plain(story, record, event, what, reason=reason, took_s=took_s, **way)


def _plain(story: _OpenStory, record: Record, event: str, what: Happened, **rest: Any) -> Line:
    at_s = float(record["at"]) - story.arrived_s
    ids = {"event": record.get("step", 0), "cause": record.get("cause_step", 0)}
    return Line(at_s=at_s, what=what, event_in_words=event, **ids, **rest)
