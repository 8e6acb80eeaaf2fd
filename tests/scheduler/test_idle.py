"""When idle workers sleep and end: the rule alone."""

from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.idle import BREAK_EVEN, Ending, Idle, IdleSettings, WorkerAtRest

SETTINGS = IdleSettings(sleep_after_s=10.0, stop_after_s=20.0)


def at_rest(count: int, asleep: bool = True, wake_s: float = 2.0) -> list[WorkerAtRest]:
    """Return workers w1, w2, ... of which w1 is woken first."""
    return [WorkerAtRest(f"w{rank}", rank, asleep, wake_s) for rank in range(1, count + 1)]


class TestSleeping:
    def test_a_never_used_worker_sleeps_after_its_delay(self) -> None:
        """A started worker that is not needed sleeps like one that was used."""
        idle = Idle(SETTINGS)
        assert idle.look(0, at_rest(1, asleep=False), 100.0).sleep == ()
        assert idle.look(0, at_rest(1, asleep=False), 109.9).sleep == ()
        assert idle.look(0, at_rest(1, asleep=False), 110.0).sleep == ("w1",)

    def test_a_sleeper_ends_after_its_delay(self) -> None:
        """The time counts from when it fell asleep, not from its last use."""
        idle = Idle(SETTINGS)
        idle.look(0, at_rest(1, asleep=False), 0.0)
        idle.look(0, at_rest(1), 10.0)
        assert idle.endings["w1"] == Ending(30.0, kept=False)
        assert idle.look(0, at_rest(1), 29.9).stop == ()
        assert idle.look(0, at_rest(1), 30.0).stop == ("w1",)

    def test_use_in_between_restarts_the_delay(self) -> None:
        """A worker that is needed now and then is not stopped by the sum of its pauses."""
        idle = Idle(SETTINGS)
        idle.look(0, at_rest(1), 0.0)
        idle.look(1, [], 15.0)
        assert idle.look(0, at_rest(1), 20.0).stop == ()
        assert idle.look(0, at_rest(1), 39.9).stop == ()
        assert idle.look(0, at_rest(1), 40.0).stop == ("w1",)

    def test_the_last_to_be_woken_is_stopped_first(self) -> None:
        """The next arrival finds a warm worker, if there is one."""
        idle = Idle(SETTINGS)
        idle.look(0, at_rest(3), 0.0)
        assert idle.look(0, at_rest(3), 20.0).stop == ("w3", "w2", "w1")


class TestHysteresis:
    def needed_every(self, gap_s: float, wake_s: float, times: int = 3) -> tuple[Idle, float]:
        """Return a worker that was needed several times, with such gaps in between, now asleep again."""
        idle, now_s = Idle(IdleSettings(0.0, 1.0)), 0.0
        for _ in range(times):
            idle.look(1, [], now_s)
            idle.look(0, at_rest(1, wake_s=wake_s), now_s)
            now_s += gap_s
        idle.look(1, [], now_s)
        idle.look(0, at_rest(1, wake_s=wake_s), now_s)
        return idle, now_s

    def test_a_sleeper_s_announced_end_is_when_it_ends(self) -> None:
        """An operator who waits for the GPU reads when it is free, and why that is later than configured."""
        idle, now_s = self.needed_every(1.0, wake_s=2.0)
        ending = idle.endings["w1"]
        assert (ending.kept, ending.at_s - now_s) == (True, BREAK_EVEN * 2.0)
        assert idle.look(0, at_rest(1, wake_s=2.0), ending.at_s - 0.1).stop == ()
        assert idle.look(0, at_rest(1, wake_s=2.0), ending.at_s).stop == ("w1",)
        assert idle.endings == {}

    def test_a_worker_that_is_soon_needed_again_is_kept_for_a_while(self) -> None:
        """A start of ten seconds is not paid to save five."""
        idle, now_s = self.needed_every(gap_s=5.0, wake_s=10.0)
        assert idle.look(0, at_rest(1, wake_s=10.0), now_s + 39.9).stop == ()
        assert idle.look(0, at_rest(1, wake_s=10.0), now_s + 40.0).stop == ("w1",)

    def test_a_rarely_needed_worker_ends_as_configured(self) -> None:
        """Where a start is cheap against the pauses, the operator's delay is the delay."""
        idle, now_s = self.needed_every(gap_s=50.0, wake_s=10.0)
        assert idle.look(0, at_rest(1, wake_s=10.0), now_s + 1.0).stop == ("w1",)

    def test_only_as_many_are_kept_as_were_needed_at_once(self) -> None:
        """One busy worker does not keep its idle neighbour awake."""
        idle, now_s = self.needed_every(gap_s=5.0, wake_s=10.0)
        idle.look(0, at_rest(2, wake_s=10.0), now_s)
        assert idle.look(0, at_rest(2, wake_s=10.0), now_s + 1.0).stop == ("w2",)


@given(
    uses=st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 500.0)), max_size=30),
    wake_s=st.floats(0.0, 100.0),
    stop_after_s=st.floats(0.0, 100.0),
)
def test_every_idle_worker_ends_and_none_too_early(
    uses: list[tuple[int, float]], wake_s: float, stop_after_s: float
) -> None:
    """In any history: at least the configured time, at most that or `BREAK_EVEN` wake times."""
    idle, now_s = Idle(IdleSettings(0.0, stop_after_s)), 0.0
    for in_use, seconds in uses:
        idle.look(in_use, at_rest(4 - in_use, wake_s=wake_s), now_s)
        now_s += seconds
    idle.look(4, [], now_s)
    idle.look(0, at_rest(4, wake_s=wake_s), now_s)
    for warm in range(1, 5):
        assert stop_after_s <= idle.stop_delay_s(warm, wake_s) <= max(stop_after_s, BREAK_EVEN * wake_s)
    latest_s = now_s + max(stop_after_s, BREAK_EVEN * wake_s) + 1e-6
    assert set(idle.look(0, at_rest(4, wake_s=wake_s), latest_s).stop) == {"w1", "w2", "w3", "w4"}
