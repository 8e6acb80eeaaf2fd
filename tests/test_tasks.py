"""The daemon's own tasks: a failed one is restarted, and the operator hears of it."""

import asyncio
import logging

import pytest

from melld import tasks as module
from melld.tasks import RESTS_S, Tasks, Work, vital


class Failing:
    """Work that fails so often, with this error, and then goes on."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.runs = 0
        self.is_well = asyncio.Event()
        self._times = times
        self._error = error or ValueError("boom")

    async def run(self) -> None:
        self.runs += 1
        if self.runs <= self._times:
            raise self._error
        self.is_well.set()
        await asyncio.Event().wait()


async def kept(work: Failing, rests_s: tuple[float, ...] = (0.0,)) -> Tasks:
    """The tasks under guard, once the work goes on."""
    tasks = Tasks()
    tasks.keep("work", Work(work.run, rests_s))
    await work.is_well.wait()
    return tasks


async def test_a_failing_task_is_restarted_until_it_works_and_logged() -> None:
    """A watchman that stumbles costs no stream, and is not forgotten either."""
    tasks = await kept(Failing(3))
    assert tasks.restarts == {"work": 3}
    assert tasks.troubled() == ["work"]
    assert tasks.warnings() == ["a bug in melld: the task 'work' failed (ValueError: boom), and runs again"]
    await tasks.cancel()


async def test_restarts_back_off_and_say_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails at once each time must not take a core, nor fill the log."""
    rests_s: list[float] = []
    told: list[str] = []
    at_once, work = asyncio.sleep, Failing(5)

    async def rest(seconds: float) -> None:
        rests_s.append(seconds)
        told.extend(tasks.warnings())
        await at_once(0)

    monkeypatch.setattr(module.asyncio, "sleep", rest)
    tasks = Tasks()
    tasks.keep("work", Work(work.run))
    await work.is_well.wait()
    assert rests_s == [*RESTS_S, RESTS_S[-1]]
    assert told[2] == "a bug in melld: the task 'work' failed (ValueError: boom), and restarts in 10 s"
    await tasks.cancel()


async def test_a_task_that_has_run_for_long_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Last week's failure is forgotten, and the next one is the first again."""
    monkeypatch.setattr(module, "HEALTHY_S", 0.0)
    tasks, work = Tasks(), Failing(20)
    tasks.keep("work", Work(work.run, (0.0, 3600.0), healthy_s=0.0))
    await work.is_well.wait()
    assert tasks.warnings() == []
    await tasks.cancel()


async def test_the_same_failure_has_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The log stays readable while a bug repeats itself."""
    with caplog.at_level(logging.ERROR, "melld.tasks"):
        tasks = await kept(Failing(3))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]
    await tasks.cancel()


async def test_a_task_that_awaited_a_cancelled_one_does_not_count_as_cancelled() -> None:
    """It would end silently, and nobody would look after the workers."""
    tasks = await kept(Failing(1, asyncio.CancelledError()))
    assert tasks.restarts == {"work": 1}
    await tasks.cancel()


async def test_finished_work_is_not_restarted() -> None:
    """Some of it has an end, such as filling a table."""
    work, over = Failing(0), asyncio.Event()

    async def once() -> None:
        work.runs += 1
        over.set()

    tasks = Tasks()
    tasks.keep("work", Work(once))
    await over.wait()
    await tasks.cancel()
    assert (work.runs, tasks.restarts, tasks.troubled()) == (1, {"work": 0}, [])


async def test_a_vital_task_that_cannot_go_on_is_reported_to_the_daemon() -> None:
    """A daemon that answers nobody makes room for another; the others' failures are no reason."""
    given_up: asyncio.Queue[str] = asyncio.Queue()
    tasks, work = Tasks(given_up.put_nowait), Failing(100)
    kept_on = vital(work.run)
    tasks.keep("outputs", Work(kept_on.start, (0.0,), kept_on.failures_allowed))
    assert await given_up.get() == "outputs"
    assert work.runs == kept_on.failures_allowed
    await tasks.cancel()
