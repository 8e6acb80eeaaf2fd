"""What one daemon leaves to the next: for its eyes alone, and read once."""

import os
from pathlib import Path

import pytest

from melld.api.answers import Refusal
from melld.api.stored_responses import Stored, StoredResponses
from melld.config_server import ServerConfig
from melld.daemon.renewal.legacy import FILE, Legacy, NotLeft, leave, take
from melld.decisions.stories import Happened, Line, Stories, Story


def store() -> StoredResponses:
    return StoredResponses(ServerConfig, lambda: {b"one"})


def story(name: str) -> Story:
    line = Line(at_s=0.0, what=Happened.ARRIVED, event=1, event_in_words=f"{name} arrived")
    return Story(request=name, ended=True, lines=(line,))


def test_it_is_for_its_owner_alone_and_goes_when_it_is_read(tmp_path: Path) -> None:
    """Clients' texts are in it."""
    old = store()
    old.put(b"one", "resp_1", Stored(body=b"{}", messages=[{"role": "user", "content": "Hi"}], size=9))
    leave(tmp_path, Legacy(old.left(), {"demo": [story("a")]}))
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    legacy = take(tmp_path)
    assert list(tmp_path.iterdir()) == []
    new, stories = store(), Stories(kept=2)
    new.take(legacy.responses)
    stories.keep(legacy.stories["demo"])
    assert new.find(b"one", "resp_1").messages == [{"role": "user", "content": "Hi"}]
    assert stories.story("a") == story("a")
    assert take(tmp_path) == Legacy()


def test_what_the_old_one_still_makes_is_done_or_failed_in_the_end(tmp_path: Path) -> None:
    """Whoever asks for it meanwhile is told that it is in progress; what was deleted does not come back."""
    old, new = store(), store()
    for name in ("done", "lost", "deleted"):
        body = b'{"status": "in_progress"}'
        old.put(b"one", name, Stored(body=body, messages=[], size=1, background=True, is_done=name == "deleted"))
    new.take(old.left())
    new.delete(b"one", "deleted")
    old.find(b"one", "done").done(b'{"status": "completed"}')
    new.take(old.left())
    new.maker_ended()
    assert new.find(b"one", "done").said() == {"status": "completed"}
    assert new.find(b"one", "lost").said()["status"] == "failed"
    with pytest.raises(Refusal):
        new.find(b"one", "deleted")


def test_a_file_of_another_version_or_without_room_is_no_failure(tmp_path: Path) -> None:
    """An upgrade starts without it; a full disk is said."""
    (tmp_path / FILE).write_bytes(b"\xff\x00 something else")
    assert take(tmp_path) == Legacy()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotLeft, match="No such file or directory"):
        leave(tmp_path / "gone", Legacy(stories={"demo": [story("a")]}))


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is told to stop while a renewal begins writes it twice."""
    sync = os.fsync

    def other_writes(number: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        leave(tmp_path, Legacy(stories={"demo": [story("first")]}))
        sync(number)

    monkeypatch.setattr(os, "fsync", other_writes)
    leave(tmp_path, Legacy(stories={"demo": [story("second")]}))
    assert take(tmp_path) == Legacy(stories={"demo": [story("second")]})
    assert list(tmp_path.iterdir()) == []
