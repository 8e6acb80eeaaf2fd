"""A request's story: what happened to it, when, and on which event; kept for a bounded number of requests."""

import json
from pathlib import Path

import msgspec
import pytest

from melld.cli import main
from melld.decisions.recorder import Recorder
from melld.decisions.stories import MOST_LINES, Happened, Stories, Story, stories_of
from melld.errors import UnknownRequest
from melld.scheduler import events as e
from melld.simulator.experiment import ALL_POLICIES
from tests.decisions.test_replay import log_of
from tests.scheduler.driving import scheduler_with
from tests.simulator.setups import MACHINES


def told(*happened: e.AnyEvent, kept: int = 10) -> Stories:
    """Return the stories of these events, with best fit deciding."""
    scheduler, stories = scheduler_with(0), Stories(kept)
    recorder = Recorder(scheduler)
    for number, one in enumerate(happened, start=1):
        event = msgspec.structs.replace(one, id=number)
        stories.take(recorder.take(event, scheduler.handle(event)))
    return stories


def brief(story: Story) -> list[tuple[str, str, str]]:
    """Return what happened, where the request is then, and the event."""
    return [(line.what, line.worker, line.event_in_words) for line in story.lines]


UP = (e.WorkerUp(0.0, "w0", 1000), e.WorkerUp(0.0, "w1", 1000))


def test_a_story_runs_from_arrival_to_end() -> None:
    """One command says why a stream waited, moved and paused."""
    story = told(
        *UP,
        e.RequestArrived(10.0, "a", 900),
        e.RequestArrived(10.0, "b", 900),
        e.RequestArrived(11.0, "c", 800),
        e.RequestFinished(12.0, "b"),
        e.WorkerDown(13.0, "w1"),
        e.RequestFinished(14.5, "a"),
        e.RequestResumed(14.75, "c", pause_s=1.75),
        e.RequestPreempted(15.0, "c"),
        e.RequestFinished(16.0, "c"),
    ).story("c")
    assert story.ended
    assert brief(story) == [
        (Happened.ARRIVED, "", "c arrived"),
        (Happened.QUEUED, "", "c arrived"),
        (Happened.PLACED, "w1", "b ended"),
        (Happened.DISPLACED, "", "w1 is gone"),
        (Happened.QUEUED, "", "w1 is gone"),
        (Happened.PLACED, "w0", "a ended"),
        (Happened.RESUMED, "w0", "c resumed"),
        (Happened.PREEMPTED, "w0", "w0 preempted c"),
        (Happened.FINISHED, "", "c ended"),
    ]
    assert [line.event for line in story.lines] == [5, 5, 6, 7, 7, 8, 9, 10, 11]
    assert [line.at_s for line in story.lines] == [0.0, 0.0, 1.0, 2.0, 2.0, 3.5, 3.75, 4.0, 5.0]
    assert [line.reason for line in story.lines if line.reason] == ["no room", "room", "no room", "room"]
    assert story.lines[6].pause_s == 1.75


def test_a_move_says_who_wanted_it_how_it_went_and_how_long_it_took() -> None:
    """An operator sees that somebody else moved the request, and what that cost."""
    story = told(
        *UP,
        e.RequestArrived(1.0, "a", 100),
        e.MoveAsked(2.0, "a", "w1"),
        e.MoveCommitted(2.5, "a", "w1", "tokens", cause=4),
        e.MoveAsked(3.0, "a", "w0"),
        e.MoveAborted(3.25, "a", "timed out", "w0", cause=6),
        e.MoveAsked(4.0, "a", "w0"),
        e.WorkerDown(5.0, "w0"),
    ).story("a")
    began, moved, again, cancelled, _, died = story.lines[2:]
    assert (began.what, began.reason, began.source, began.worker, began.via) == (
        "move began",
        "operator",
        "w0",
        "w1",
        "kv",
    )
    assert began.event_in_words == "an operator asked to move a to w1"
    assert (moved.what, moved.source, moved.worker, moved.via) == (Happened.MOVED, "w0", "w1", "tokens")
    assert (moved.took_s, moved.cause) == (0.5, began.event)
    assert (cancelled.what, cancelled.worker, cancelled.reason) == (Happened.MOVE_CANCELLED, "w1", "timed out")
    assert (cancelled.took_s, cancelled.cause) == (0.25, again.event)
    assert (died.what, died.reason, died.worker) == (Happened.MOVE_CANCELLED, "its destination is gone", "w1")
    assert died.cause == story.lines[-2].event


def test_a_lost_machine_is_one_event_in_all_its_requests_stories() -> None:
    """A request is displaced once, and not placed on a worker that was lost at the same moment."""
    up = *UP, e.WorkerUp(0.0, "w2", 1000, machine=1)
    arrivals = e.RequestArrived(1.0, "a", 900), e.RequestArrived(1.0, "b", 900)
    lost = told(*up, *arrivals, e.WorkerDown(2.0, "w0", ("w1",)))
    first, second = (lost.story(name).lines for name in "ab")
    assert [(line.what, line.worker) for line in first[2:]] == [(Happened.DISPLACED, ""), (Happened.PLACED, "w2")]
    assert [line.what for line in second[2:]] == [Happened.DISPLACED, Happened.QUEUED]
    assert {line.event_in_words for line in (*first[2:], *second[2:])} == {"w0, w1 are gone"}


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_story_is_consistent(policy: str, machines: str) -> None:
    """Under any policy it has a beginning, an end, and for each end of a move the decision before it."""
    records = [json.loads(line) for line in log_of(policy, MACHINES[machines])]
    stories = stories_of(records)
    requests = [record["request"] for record in records if record["kind"] == "arrive"]
    assert len(requests) > 50
    for story in map(stories.story, requests):
        lines = story.lines
        assert (lines[0].what, lines[-1].what, story.ended) == (Happened.ARRIVED, Happened.FINISHED, True)
        assert [line.event for line in lines] == sorted(line.event for line in lines)
        assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
        began = 0
        for line in lines:
            if line.what is Happened.MOVE_BEGAN:
                began = line.event
            elif line.what in (Happened.MOVED, Happened.MOVE_CANCELLED):
                assert line.cause == began
                assert line.took_s is not None
                assert line.took_s >= 0
            elif line.what is Happened.PLACED:
                assert line.worker


def test_only_the_most_recently_ended_stories_are_kept() -> None:
    """A daemon that runs for months does not grow by its stories."""
    happened: list[e.AnyEvent] = [*UP]
    for number in range(5):
        happened += [e.RequestArrived(1.0, f"r{number}", 10), e.RequestFinished(1.0, f"r{number}")]
    stories = told(*happened, e.RequestArrived(3.0, "alive", 10), kept=2)
    assert [stories.story(name).ended for name in ("r3", "r4", "alive")] == [True, True, False]
    for name in ("r0", "r2", "nobody"):
        with pytest.raises(UnknownRequest):
            stories.story(name)


def test_a_long_story_keeps_its_beginning_and_latest_lines() -> None:
    """A request that is moved a thousand times does not fill the memory."""
    moves: list[e.AnyEvent] = []
    for number in range(MOST_LINES):
        there = f"w{1 - number % 2}"
        moves += [e.MoveAsked(2.0 + number, "a", there), e.MoveCommitted(2.5 + number, "a", there)]
    story = told(*UP, e.RequestArrived(1.0, "a", 100), *moves).story("a")
    assert (len(story.lines), story.left_out) == (MOST_LINES, 2 + 2 * MOST_LINES - MOST_LINES)
    assert (story.lines[0].what, story.lines[-1].what) == (Happened.ARRIVED, Happened.MOVED)
    assert story.lines[-1].at_s == MOST_LINES + 0.5


def test_an_unambiguous_part_of_an_id_is_enough() -> None:
    """Ids are long; live requests come before ended ones."""
    stories = told(
        *UP, e.RequestArrived(1.0, "chat-aa", 1), e.RequestArrived(1.0, "chat-ab", 1), e.RequestFinished(2.0, "chat-ab")
    )
    assert [stories.story(part).request for part in ("aa", "ab", "chat")] == ["chat-aa", "chat-ab", "chat-aa"]
    stories.take([{"at": 3.0, "kind": "arrive", "request": "chat-aaa", "step": 9}])
    assert stories.story("chat-aa").request == "chat-aa"
    with pytest.raises(UnknownRequest, match="2 requests"):
        stories.story("chat")


def test_a_full_id_never_matches_a_longer_one() -> None:
    """The story of `r1`, which has ended, is not that of `r10`, which runs."""
    ended = e.RequestArrived(1.0, "r1", 100), e.RequestFinished(2.0, "r1")
    stories = told(*UP, *ended, e.RequestArrived(3.0, "r10", 100))
    assert stories.story("r1").request == "r1"
    assert stories.story("r10").request == "r10"


def test_a_story_can_be_read_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even after the daemon's end, and with a torn last line."""
    log = tmp_path / "decisions.jsonl"
    log.write_bytes(b"".join(log_of("mell-plus", MACHINES["slow, faulty moves"])) + b'{"at":')
    assert main(["why", "r3", "--log", str(log)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("r3: ended ")
    assert "0.000 s  arrived  (#" in text
    assert "placed on w" in text
    assert main(["why", "r3", "--log", str(log), "--json"]) == 0
    story = msgspec.json.decode(capsys.readouterr().out, type=Story)
    assert (story.request, story.lines[-1].what) == ("r3", Happened.FINISHED)
    assert main(["why", "nobody", "--log", str(log)]) == 1
    assert "no request 'nobody'" in capsys.readouterr().err
