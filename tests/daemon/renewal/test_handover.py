"""The hand-over between two daemons, in every order of events and with a death of either at any moment."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from melld.daemon.renewal.handover import OVER, Command, Event, State, step
from melld.errors import IllegalTransition

OLD_TAKES = frozenset({State.SERVING, State.STARTED, State.GIVING})
"""Those in which the old daemon takes requests; the new one does once it has taken over."""
DEVICES = ("cuda:0", "cuda:1", "cuda:2")


class Sides:
    """Both daemons, what they have, and the packets between them; what takes time ends when `chance` says."""

    def __init__(self, chance: random.Random, devices: int) -> None:
        self.chance = chance
        self.old: State | None = State.STARTED
        self.new: State | None = State.WAITING
        self.holder: dict[str, str] = dict.fromkeys(DEVICES[:devices], "old")
        self.to_old: deque[Event] = deque()
        self.to_new: deque[Event | tuple[str, ...]] = deque()
        self.running: list[tuple[str, Callable[[], None]]] = [("new", lambda: self.to_old.append(Event.WANTS))]
        self.open = "old"
        self.is_ready = self.is_said = False

    # -- what a side does --------------------------------------------------------------------------------------------

    def happen_old(self, event: Event) -> None:
        if self.old is None or self.old in OVER:
            return
        self.old, commands = step(self.old, event)
        if self.old is State.SERVING:
            self.running = [one for one in self.running if one[0] != "old"]
        for command in commands:
            self.act_old(command)

    def act_old(self, command: Command) -> None:
        match command:
            case Command.LEND:
                mine = [device for device, holder in self.holder.items() if holder == "old"]
                if self.old is State.CLOSED:
                    self.running.append(("old", lambda: self.give([*self.holder])))
                elif len(mine) > 1:
                    self.running.append(("old", lambda: self.give(mine[-1:])))
                elif self.old is State.GIVING:
                    self.happen_old(Event.NONE_TO_SPARE)
            case Command.AWAIT_STREAMS:
                self.running.append(("old", lambda: self.happen_old(Event.STREAMS_ENDED)))
            case Command.LEAVE:
                outcome = self.chance.choice([Event.LEFT] * 4 + [Event.CALLED_OFF])
                self.running.append(("old", lambda: self.happen_old(outcome)))
            case Command.CLOSE:
                self.open = "" if self.open == "old" else self.open
            case Command.SAY_YOURS:
                self.running.append(("old", self.say_yours))
            case Command.END_OTHER:
                self.kill_new()
            case Command.GO_ON:
                assert self.open != "new"
                assert self.new is None, "it takes back what another computes on"
                self.open, self.holder = "old", dict.fromkeys(self.holder, "old")
            case Command.END:
                self.kill_old()

    def give(self, devices: Sequence[str]) -> None:
        for device in devices:
            self.holder[device] = ""
        self.to_new.append(tuple(devices))

    def say_yours(self) -> None:
        self.is_said = True
        self.to_new.append(Event.YOURS)
        self.happen_old(Event.YOURS)

    def happen_new(self, event: Event) -> None:
        if self.new is None:
            return
        self.new, commands = step(self.new, event)
        for command in commands:
            self.act_new(command)

    def act_new(self, command: Command) -> None:
        match command:
            case Command.ASK:
                self.to_old.append(Event.WANTS)
            case Command.START | Command.START_ALL:
                free = [device for device, holder in self.holder.items() if holder == ""]
                for device in free:
                    self.holder[device] = "new"
                if not self.is_ready:
                    self.is_ready = True
                    self.running.append(("new", lambda: self.happen_new(Event.WORKER_READY)))
                elif self.old is not None and command is Command.START:
                    self.running.append(("new", lambda: self.to_old.append(Event.WANTS)))
            case Command.OFFER:
                self.to_old.append(Event.SERVES)
            case Command.ACCEPT:
                assert self.open != "old", "two take requests"
                self.open = "new"

    # -- deaths ------------------------------------------------------------------------------------------------------

    def kill_old(self) -> None:
        """Its sockets, its workers and its end of the channel go with it; what it has sent arrives first."""
        if self.old is None:
            return
        self.old = None
        self.running = [one for one in self.running if one[0] != "old"]
        self.holder = {device: "" if holder == "old" else holder for device, holder in self.holder.items()}
        self.open = "" if self.open == "old" else self.open
        self.to_new.append(Event.OTHER_ENDED)

    def kill_new(self) -> None:
        if self.new is None:
            return
        self.new = None
        self.running = [one for one in self.running if one[0] != "new"]
        self.holder = {device: "" if holder == "new" else holder for device, holder in self.holder.items()}
        self.open = "" if self.open == "new" else self.open
        self.to_old.append(Event.OTHER_ENDED)

    def advance(self) -> bool:
        """Let one thing happen, if anything can; check that never two have the same."""
        ways: list[Callable[[], None]] = []
        if self.to_old and self.old is not None:
            ways.append(lambda: self.happen_old(self.to_old.popleft()))
        if self.to_new and self.new is not None:
            ways.append(self.deliver)
        ways += [partial(self.finish, one) for one in self.running]
        if not ways:
            return False
        self.chance.choice(ways)()
        assert self.old not in OLD_TAKES or self.new is not State.TAKEN_OVER or self.open == "old"
        return True

    def finish(self, one: tuple[str, Callable[[], None]]) -> None:
        self.running.remove(one)
        one[1]()

    def deliver(self) -> None:
        message = self.to_new.popleft()
        self.happen_new(message if isinstance(message, Event) else Event.GIVEN)

    def serving(self) -> list[str]:
        """Who takes requests: by what it believes, and by who reads the socket."""
        believed = ["old"] * (self.old in OLD_TAKES) + ["new"] * (self.new is State.TAKEN_OVER)
        assert believed == [self.open] * bool(self.open)
        return believed


FAULTS: dict[str, Callable[[Sides], None]] = {
    "old dies": Sides.kill_old,
    "new dies": Sides.kill_new,
    "called off": lambda sides: sides.happen_old(Event.CALLED_OFF),
}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_one_daemon_is_left_that_takes_requests_and_has_all_devices(devices: int, fault: str) -> None:
    """Whatever dies when; and without a fault it is the new one, unless the disk is full."""
    outcomes = set()
    for seed in range(400):
        sides = Sides(random.Random(seed), devices)
        at, steps = sides.chance.randrange(25), 0
        while sides.advance() or steps <= at:
            if steps == at and fault != "none":
                FAULTS[fault](sides)
            steps += 1
            assert steps < 500
        if sides.old is None and sides.new is None:  # it had ended by itself before the other was killed
            assert fault in ("old dies", "new dies")
            continue
        [left] = sides.serving()
        outcomes.add(left)
        assert fault != "none" or sides.is_said == (left == "new"), "idle connections were not handed over"
        assert set(sides.holder.values()) == {left}, (seed, sides.holder)
    assert outcomes >= {"none": {"new", "old"}, "old dies": {"new"}, "new dies": {"old"}, "called off": {"old"}}[fault]


def test_a_stop_before_the_new_one_serves_ends_both() -> None:
    """`systemctl stop` means the service."""
    for state in (State.STARTED, State.GIVING, State.CLOSED):
        assert step(state, Event.STOPPED) == (State.STOPPED, [Command.END_OTHER])
    assert step(State.HANDED_OVER, Event.STOPPED) == (State.ENDED, [Command.END])


def test_what_cannot_come_changes_nothing() -> None:
    """A bug is told as such."""
    with pytest.raises(IllegalTransition):
        step(State.WAITING, Event.YOURS)
