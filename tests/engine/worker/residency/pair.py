"""A pair of workers, and a move between them, spelled out step by step."""

import contextlib
import itertools
import operator
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from melld.migrate.migration import HEADROOM_TOKENS
from melld.migrate.snapshot import CopyPlan, RequestFacts, RequestSnapshot
from tests.engine.worker.residency.driver import Answer, Refused, WorkerProxy
from tests.forked import ForkedPython

_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """A request as a client would send it: its name, prompt and sampling parameters."""

    name: str
    prompt: tuple[int, ...]
    params: dict[str, Any]

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Running:
    """A running request: where it is, and its output so far."""

    case: Case
    request_id: str
    home: WorkerProxy
    answer: Answer = field(default_factory=Answer)


@contextlib.contextmanager
def two_workers(
    model: Path, options: dict[str, Any], start: type[subprocess.Popen[Any]] = ForkedPython
) -> Iterator[tuple[WorkerProxy, WorkerProxy]]:
    """Two workers on the model, which load it side by side."""
    workers = [WorkerProxy(str(model), options, start) for _ in range(2)]
    try:
        for worker in workers:
            worker.receive()
        yield workers[0], workers[1]
    finally:
        for worker in workers:
            worker.close()


class Pair:
    """Two workers, `here` and `there`, and the requests on them."""

    def __init__(self, here: WorkerProxy, there: WorkerProxy) -> None:
        self.here, self.there = here, there
        self.live: dict[str, Running] = {}
        self.preemptions = self.steps = 0
        self._unmoved: dict[Case, Answer] = {}

    def start(
        self, case: Case, worker: WorkerProxy | None = None, *, salt: str | None = None, priority: int = 0
    ) -> Running:
        """Submit the request.  By default no other request's prefix cache can help it."""
        number = next(_numbers)
        running = Running(case, f"request-{number}", worker or self.here)
        extra = {"cache_salt": salt or f"salt-{number}", "priority": priority}
        running.home("add", running.request_id, list(case.prompt), case.params, extra)
        self.live[running.request_id] = running
        return running

    def step(self, count: int = 1) -> None:
        """Run that many steps on both workers, checking that each output comes from the request's home."""
        for _ in range(count):
            self.steps += 1
            for worker in (self.here, self.there):
                for output in worker("step", 1):
                    running = self.live[output["id"]]
                    assert running.home is worker, f"{output['id']} emitted on a worker that does not own it"
                    running.answer.add(output)
                    self.preemptions += output["preempted"]

    def finish(self, *running: Running) -> list[Answer]:
        """Step until these have ended."""
        steps = 0
        while any(one.answer.finish is None for one in running):
            self.step()
            steps += 1
            assert steps < 3000, "a request hangs"
        return [one.answer for one in running]

    def unmoved(self, case: Case) -> Answer:
        """Return the answer of a run in which nothing moves."""
        return self.all_unmoved([case])[0]

    def all_unmoved(self, cases: Iterable[Case]) -> list[Answer]:
        """Return the answers of such a run, computing unknown ones together."""
        cases = list(cases)
        new = [case for case in dict.fromkeys(cases) if case not in self._unmoved]
        self._unmoved |= zip(new, self.finish(*map(self.start, new)), strict=True)
        return [self._unmoved[case] for case in cases]

    def all_resumed_from_the_log(self, cases: Iterable[Case]) -> list[Answer]:
        """Answer the cases on `there`, from prompt and tokens so far, after `here` has lost them."""
        running = [self.start(case) for case in cases]
        core = [self.here("core_request", one.request_id)[0] for one in running]
        self.step(15)
        self.here("abort", [one.request_id for one in running])
        for one, words in zip(running, core, strict=True):
            one.home = self.there
            self.there("attach_unreserved", words, one.answer.tokens)
        return self.finish(*running)

    @contextlib.contextmanager
    def emptied(self) -> Iterator["Pair"]:
        """Check every test's invariant: when all requests have ended, both workers are as empty as at the start."""
        yield self
        try:
            self.assert_idle()
        finally:
            self.clear()  # a failure here must not fail its neighbours

    def other(self, worker: WorkerProxy) -> WorkerProxy:
        """Return the other worker."""
        return self.there if worker is self.here else self.here

    def spoil(self) -> None:
        """Spoil free blocks, so that no test passes because they happen to hold the right data or zeros."""
        for worker in (self.here, self.there):
            worker("spoil")

    def move(self, running: Running, via: str = "kv", *, decode_meanwhile: int = 3) -> RequestSnapshot | None:
        """Make one live move: reserve, copy full blocks while it decodes, freeze, copy the rest, attach, release.

        None if the request ended before it was frozen.
        """
        source, target, name = running.home, self.other(running.home), running.request_id
        core_request, tokens = source("core_request", name)
        facts: RequestFacts = source("facts", name)
        room = facts.num_tokens + HEADROOM_TOKENS
        reservation = target("reserve", core_request, tokens, room, facts.num_computed_tokens if via == "kv" else 0)
        plan = CopyPlan(reservation)
        if via == "kv":
            self.copy(plan, reservation, source, target, facts.full_block_ids, facts.block_epoch)
        self.step(decode_meanwhile)
        if running.answer.finish is not None:
            target("cancel", name)
            return None
        return self.complete(running, plan, via)

    def complete(self, running: Running, plan: CopyPlan, via: str = "kv") -> RequestSnapshot | None:
        """Make the second half of a move: freeze, copy the rest, attach, release.  None if the request ended first."""
        source, target, name = running.home, self.other(running.home), running.request_id
        if not self._settle(source, name, via):
            target("cancel", name)
            return None
        raw = source("snapshot", name)
        snapshot = msgspec.msgpack.decode(raw, type=RequestSnapshot)
        try:
            reservation = target("grow", name, snapshot.num_tokens)
        except Refused:  # it has outgrown the destination meanwhile
            target("cancel", name)
            source("thaw", name)
            return None
        if via == "kv":
            self.copy(plan, reservation, source, target, snapshot.block_ids, snapshot.block_epoch)
        target("attach", raw, via)
        running.home = target
        source("release", name)
        return snapshot

    def _settle(self, source: WorkerProxy, name: str, via: str) -> bool:
        """Freeze, and step until nothing of the request is in flight; return True if it is still there."""
        still = source("freeze", name, via)
        while still == "in flight":
            self.step()
            still = source("stillness", name)
        return bool(still == "settled")

    def copy(self, plan: CopyPlan, reservation: Any, source: Any, target: Any, blocks: Any, epoch: int) -> None:
        blocks, into, places = plan.missing(blocks, epoch, reservation)
        target("pull", source("handle"), blocks, into)
        plan.copied(places, epoch)

    def clear(self) -> None:
        """End all remaining requests."""
        self.live.clear()
        for worker in (self.here, self.there):
            state = worker("state")
            worker("abort", [*state["requests"], *state["frozen"], *state["expected"]])
            worker("step", 2)

    def assert_idle(self) -> None:
        """Check that nothing is left on either worker."""
        self.live.clear()
        for worker in (self.here, self.there):
            worker("step", 2)
            state = worker("state")
            assert state["free_blocks"] == state["total_blocks"], state
            left = [state[key] for key in ("requests", "runner_requests", "tables", "waiting", "running")]
            assert not any(left), state
            assert not state["frozen"], state
            assert not state["expected"], state

    def check_move(self, case: Case, via: str, steps: int) -> None:
        """Check that a request moved after so many steps gives its unmoved answer."""
        expected = self.unmoved(case)
        running = self.start(case)
        self.step(steps)
        self.move(running, via, decode_meanwhile=0)
        assert [expected] == self.finish(running)

    def check_moves(
        self,
        moves: Iterable[tuple[Case, str]],
        steps: int,
        is_same: Callable[[Answer, Answer], bool] = operator.eq,
    ) -> None:
        """Check that concurrent requests, each moved its way after so many steps, give their unmoved answers."""
        moves = list(moves)
        expected = self.all_unmoved(case for case, _ in moves)
        running = [self.start(case) for case, _ in moves]
        self.step(steps)
        for one, (_, via) in zip(running, moves, strict=True):
            assert self.move(one, via, decode_meanwhile=1) is not None, one.case.name
        for one, answer, unmoved in zip(running, self.finish(*running), expected, strict=True):
            assert is_same(answer, unmoved), (one.case.name, answer, unmoved)

    def check_every_move(self, case: Case, via: str, moments: int) -> None:
        """Check a short request moved after 0, 1, 2 ... steps: it gives the same answer.

        One begins at each step, so that most of them run beside others, and no two move at once.
        """
        short = Case(f"{case.name}, short", case.prompt[:60], case.params | {"max_tokens": 12})
        expected = self.unmoved(short)
        runs: list[Running] = []
        due: list[int] = []  # at which step of all each of them moves
        moved = 0
        while moved < moments:
            if len(runs) < moments:
                due.append(self.steps + len(runs))
                runs.append(self.start(short))
            if due[moved] <= self.steps:
                assert due[moved] == self.steps
                if runs[moved].answer.finish is None:
                    self.move(runs[moved], via, decode_meanwhile=0)
                moved += 1
            self.step()
        assert [expected] * len(runs) == self.finish(*runs)
