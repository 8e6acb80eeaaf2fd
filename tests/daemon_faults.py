"""Faults of the daemon's tasks on demand: an exception in the midst of a task's repeated work.

Owns the points.  The daemon's own code knows nothing of them.  If a file `TASK.RAISE` is in the directory that
`MELLD_FAULTS` names, the task raises at its point, once, after the work there; `TASK.PASS` is only removed, which
shows that the task has come to its point.  `failures.POKE` has a request fail that nobody knows.
"""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = (
    "reload",
    "service manager",
    "control socket",
    "hung workers",
    "readings",
    "failures",
    "epochs",
    "idle workers",
)
"""Those of a daemon with one model that go on to its end and cost no stream."""


class Injected(Exception):
    """The fault."""


class TaskFaults:
    """The faults of one daemon."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def reach(self, task: str) -> None:
        """Raise the fault set for this task, if any."""
        self.take(task, "PASS")
        if self.take(task, "RAISE"):
            raise Injected(task)

    def take(self, task: str, fault: str) -> bool:
        """Return True, once, if this fault is set for this task."""
        try:
            (self._directory / f"{task}.{fault}").unlink()
        except FileNotFoundError:
            return False
        return True

    def in_task(self, task: str) -> None:
        """Raise the fault set for this task if it is the one that runs: others may pass here, too."""
        current = asyncio.current_task()
        if current is not None and current.get_name().partition(" of ")[0] == task:
            self.reach(task)

    def after(self, owner: Any, name: str, task: str) -> None:
        """Make `task` reach its fault point after calling this."""

        def call(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            self.in_task(task)
            return result

        replace(owner, name, call)


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function or method by `call`, which gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *given, **named: call(original, *given, **named)))


def inject(directory: Path) -> None:
    """Wrap what the tasks call in each turn, in this process."""
    from melld.control import runtime_directory
    from melld.daemon import lifecycle
    from melld.daemon.town.tenant import Tenant
    from melld.daemon.watch import Watch
    from melld.driver.idle import IdleWorkers
    from melld.driver.news import News
    from melld.engine.fleet.hung import HungWorkers
    from melld.engine.fleet.reports import Reports
    from melld.engine.frontend.prompt_logprobs import PromptLogprobs
    from melld.engine.frontend.tokens.texts import TokenTexts
    from melld.errors import MelldError
    from melld.ids import RequestId

    faults = TaskFaults(directory)
    faults.after(lifecycle, "in_words", "reload")
    faults.after(Watch, "why_closed", "service manager")
    faults.after(runtime_directory, "_file_at", "control socket")
    faults.after(HungWorkers, "_ping", "hung workers")
    faults.after(Watch, "_follow_capacities", "readings")
    faults.after(TokenTexts, "__call__", "token texts")
    faults.after(Reports, "take_grown", "epochs")
    faults.after(IdleWorkers, "look", "idle workers")
    faults.after(Tenant, "take_load", "landlord")

    async def get(original: Any, queue: Any) -> Any:
        faults.in_task("failures")
        return await original(queue)

    def tell(original: Any, news: Any) -> None:
        if faults.take("failures", "POKE"):
            news._fleet.requests.failures.put_nowait((RequestId("nobody's"), MelldError("nobody's")))
        original(news)

    def sift(original: Any, prompt_logprobs: Any, step: Any) -> Any:
        faults.reach("outputs")
        return original(prompt_logprobs, step)

    replace(asyncio.Queue, "get", get)
    replace(News, "tell", tell)
    replace(PromptLogprobs, "sift", sift)
