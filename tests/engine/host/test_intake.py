"""Workers' messages, read for a bounded time in each turn of the event loop."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from melld.engine.host.intake import SLICE_S, Intake


class SlowWire:
    """A wire whose messages take a quarter of a slice each."""

    def __init__(self, name: str, messages: int, read: list[str]) -> None:
        self.spec: Any = SimpleNamespace(worker=name)
        self.left = messages
        self.killed = ""
        self._read = read

    def read_on(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self._read.append(self.spec.worker)
        end_s = time.monotonic() + SLICE_S / 4
        while time.monotonic() < end_s:
            pass
        return True

    @property
    def has_more(self) -> bool:
        return self.left > 0

    def kill(self, why: str) -> None:
        self.killed = why


async def test_the_loop_turns_while_many_messages_are_read() -> None:
    """However far the daemon is behind its workers, `/health` is answered, and each worker gets its turn."""
    read: list[str] = []
    intake, wires = Intake(), [SlowWire(name, 20, read) for name in "abc"]
    for wire in wires:
        intake.came(wire)
    turns = 0
    while any(wire.left for wire in wires):
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 60 / 4 - 1
    assert all(8 <= read[4:34].count(name) <= 12 for name in "abc")  # the first came alone


async def test_a_paused_worker_is_not_read_until_it_is_resumed() -> None:
    """Its wire fills up, which is the back-pressure."""
    read: list[str] = []
    intake, wire = Intake(), SlowWire("a", 1, read)
    intake.pause("a")
    intake.came(wire)
    await asyncio.sleep(0)
    assert read == []
    intake.resume("a")
    await asyncio.sleep(0)
    assert read == ["a"]


async def test_a_message_that_cannot_be_handled_ends_only_its_worker() -> None:
    """Tokens may be lost with it: its requests resume elsewhere from the log, and the other workers are read."""
    read: list[str] = []
    intake, bad, good = Intake(), SlowWire("bad", 1, read), SlowWire("good", 1, read)
    bad.read_on = lambda: 1 / 0  # type: ignore[assignment, return-value]
    intake.came(bad)
    intake.came(good)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bad.killed
    assert read == ["good"]


async def test_only_a_lone_message_of_a_turn_is_not_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon with more to do than that does it together, which costs less."""
    monkeypatch.setattr("melld.engine.host.intake.SLICE_S", float("inf"))  # however slow the machine is
    read: list[str] = []
    intake, seen = Intake(), list[bool]()

    class Seen(SlowWire):
        def read_on(self) -> bool:
            has_read = super().read_on()
            if has_read:
                seen.append(intake.is_behind())
            return has_read

    intake.came(Seen("a", 1, read))
    intake.came(Seen("b", 1, read))
    await asyncio.sleep(0)
    intake.came(Seen("c", 2, read))
    assert seen == [False, True, True, True]
