"""Judges: real processes, forked from a real template, that compile clients' constraints and may be killed for it."""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from melld.engine.frontend.judges import SEATS, Judges
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.spec import WorkerSpec
from melld.errors import ConstraintRefused
from tests.faults.checker import is_there
from tests.nursery import fork_templates
from tests.patience import PATIENCE_S

HEAVY = {"choice": [f"option {i:06d}" for i in range(50_000)]}
"""Takes ten seconds and more to compile."""


def constraint(**fields: Any) -> bytes:
    """Return vLLM's `StructuredOutputsParams` with these fields."""
    return msgspec.msgpack.encode(fields)


class Court:
    """A template with its event loop, and a worker's specification."""

    def __init__(self, demo_model: Path) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.template = self.runner.run(_make())
        self.spec = WorkerSpec(
            worker="w0", model_path=str(demo_model), device_kind="cpu", engine_arguments={"dtype": "float32"}
        )

    @contextlib.asynccontextmanager
    async def judges(self, cpu_s: float) -> AsyncIterator[Judges]:
        """The judges as a daemon has them; all are gone at the end."""
        judges = Judges(self.template, self.spec, cpu_s)
        try:
            yield judges
        finally:
            await judges.close()
            async with asyncio.timeout(PATIENCE_S):
                while self.pids():  # noqa: ASYNC110  one that was given up before its fork ends right after it
                    await asyncio.sleep(0.01)

    def pids(self) -> set[int]:
        """Return the pids of the living judges."""
        children = Path(f"/proc/{self.template.pid}/task/{self.template.pid}/children").read_text().split()
        return {pid for pid in map(int, children) if is_there(pid)}


@pytest.fixture(scope="module")
def court(demo_model: Path) -> Iterator[Court]:
    """One template for all of these tests, forked where its imports are already made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        with warnings.catch_warnings(action="ignore"):  # which the forks inherit
            patch.setattr(util, "spawnv_passfds", fork_templates(1))
        court = Court(demo_model)
        yield court
    court.runner.run(_stop(court.template))
    court.runner.close()


async def _make() -> TemplateProcess:
    return TemplateProcess("cpu")


async def _stop(process: TemplateProcess) -> None:
    process.stop()


def test_a_constraint_that_takes_too_long_is_killed_and_remembered(court: Court) -> None:
    """It costs its budget once, its client hears why, and the next is judged as ever."""

    async def scenario() -> None:
        async with court.judges(0.3) as judges:
            for _ in range(2):
                with pytest.raises(ConstraintRefused, match=r"within 0\.3 s") as refused:
                    await judges.judge(constraint(**HEAVY), "a")
                assert refused.value.code == "constraint_too_complex"
            assert await judges.judge(constraint(choice=["a", "b"]), "a")

    court.runner.run(scenario())


def test_an_infinite_time_limit_works(court: Court) -> None:
    """With `constraint_cpu_s = inf` constraints are compiled, and not all refused."""

    async def scenario() -> None:
        async with court.judges(math.inf) as judges:
            for _ in range(3):
                assert await judges.judge(constraint(choice=["a", "b"]), "a")

    court.runner.run(scenario())


def test_a_constraint_that_takes_too_much_memory_is_killed(court: Court) -> None:
    """It is refused as too complex before it exhausts the machine, and the next is judged as ever."""

    async def scenario() -> None:
        async with court.judges(300) as judges:
            with pytest.raises(ConstraintRefused, match="1024 MiB") as refused:
                await judges.judge(constraint(json=f"[{'{},' * 14_000_000}{{}}]"), "a")
            assert refused.value.code == "constraint_too_complex"
            assert await judges.judge(constraint(choice=["a", "b"]), "a")

    court.runner.run(scenario())


def test_a_compilation_that_nobody_awaits_is_killed(court: Court) -> None:
    """A client that leaves takes its compilation with it, long before its budget is spent."""

    async def scenario() -> None:
        async with court.judges(300) as judges:
            assert await judges.judge(constraint(choice=["a"]), "a")
            heavy = asyncio.ensure_future(judges.judge(constraint(**HEAVY), "a"))
            queued = asyncio.ensure_future(judges.judge(constraint(**HEAVY, whitespace_pattern=" "), "a"))
            await asyncio.sleep(0)
            heavy.cancel()
            queued.cancel()
            await asyncio.gather(heavy, queued, return_exceptions=True)
            assert await judges.judge(constraint(choice=["b"]), "a")

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_another_client_is_judged_meanwhile(court: Court) -> None:
    """One key's heavy constraints leave a judge for the others."""

    async def scenario() -> None:
        async with court.judges(300) as judges:
            await asyncio.gather(*(judges.judge(constraint(choice=[client]), client) for client in "ab"))
            for number in itertools.count():  # until both judges wait for work
                if len(judges._idle) == SEATS:
                    break
                await judges.judge(constraint(choice=[f"{number}"]), "a")
            heavy = [
                asyncio.ensure_future(judges.judge(constraint(**HEAVY, whitespace_pattern=" " * i), "a"))
                for i in range(3)
            ]
            await asyncio.sleep(0)
            assert await judges.judge(constraint(choice=["a", "b"]), "b")
            assert not any(one.done() for one in heavy)
            for one in heavy:
                one.cancel()
            await asyncio.gather(*heavy, return_exceptions=True)

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_two_requests_for_the_same_constraint_share_one_ruling(court: Court) -> None:
    """A call with a hundred prompts is judged once, and one that leaves does not take it from the others."""

    async def scenario() -> None:
        async with court.judges(2) as judges:
            first, second = (asyncio.ensure_future(judges.judge(constraint(regex="a+b"), "a")) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            assert await second == await judges.judge(constraint(regex="a+b"), "b")

    court.runner.run(scenario())


def test_a_killed_judge_is_replaced(court: Court) -> None:
    """An operator's kill, or the kernel's out-of-memory killer, costs nobody a request."""

    async def scenario() -> None:
        async with court.judges(2) as judges:
            await judges.judge(constraint(choice=["c"]), "a")
            (pid,) = court.pids()
            os.kill(pid, signal.SIGKILL)
            assert await judges.judge(constraint(choice=["d"]), "a")

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_stopped_judge_is_replaced(court: Court) -> None:
    """What a judge without a processor could not check is not called too complex."""

    async def scenario() -> None:
        async with court.judges(0.2) as judges:
            await judges.judge(constraint(choice=["e"]), "a")
            (pid,) = court.pids()
            os.kill(pid, signal.SIGSTOP)
            assert await judges.judge(constraint(choice=["f"]), "a")

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_slow_judge_goes_on(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives it little of a processor: its own time is limited, and not the clock's."""
    monkeypatch.setattr("melld.engine.frontend.judges.STOPPED_FACTOR", 0.5)

    async def scenario() -> None:
        async with court.judges(2) as judges:
            with pytest.raises(ConstraintRefused, match="2 s of CPU time"):
                await judges.judge(msgspec.msgpack.encode(HEAVY), "a")

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_judge_with_a_closed_wire_is_replaced(court: Court) -> None:
    """Its wire closes before the template reports its end: whoever asks just then must wait."""

    async def scenario() -> None:
        async with court.judges(2) as judges:
            await judges.judge(constraint(choice=["g"]), "a")
            (pid,), (judge,) = court.pids(), judges._judges.values()
            closed = asyncio.Event()
            judge.connection_lost = lambda _: closed.set()
            os.kill(court.template.pid, signal.SIGSTOP)
            try:
                os.kill(pid, signal.SIGKILL)
                await closed.wait()
                asked = asyncio.ensure_future(judges.judge(constraint(choice=["h"]), "a"))
                await asyncio.sleep(0)
            finally:
                os.kill(court.template.pid, signal.SIGCONT)
            assert await asked

    court.runner.run(asyncio.wait_for(scenario(), PATIENCE_S))
