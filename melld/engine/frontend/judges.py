"""The judges: processes that compile output constraints before a worker does, and that may be killed.

Owns the judges, the queue for them, and their recent rulings.  A judge is started when it is first needed.

    constraint ─► known? ─► queue, fair among clients ─► judge ─► verdict        over budget, or client gone ─► killed
"""

import asyncio
import collections
import hashlib
import logging
import signal
from functools import partial

import msgspec

from melld.engine.frontend.judge_process import JudgeProcess
from melld.engine.frontend.judge_queue import Allowance, JudgeQueue
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.judge import MEMORY_BYTES, Verdict
from melld.engine.wire.spec import WorkerSpec
from melld.errors import ConstraintRefused, NoJudge

log = logging.getLogger("melld.judges")
SEATS = 2
WALL_FACTOR = 10
"""Wall-clock limit of a judge, as a multiple of its CPU time: beyond it, the judge has hardly run."""
MAX_FAILED_STARTS = 3
MAX_KNOWN_BYTES = 16 << 20


class Ruling(msgspec.Struct, frozen=True):
    """A verdict, and the constraint as a worker must compile it."""

    verdict: Verdict
    constraint: bytes = b""


class _Case:
    """A constraint, and the number of calls that wait for its ruling."""

    def __init__(self, client: str, digest: bytes, constraint: bytes) -> None:
        self.client = client
        self.digest = digest
        self.constraint = constraint
        self.ruling: asyncio.Future[Ruling] = asyncio.get_running_loop().create_future()
        self.waiting = 0
        self.is_overdue = False
        self.deaths = 0
        """Judges that ended by no fault of its own while they had it."""
        self.judge: JudgeProcess | None = None
        self.deadline: asyncio.TimerHandle | None = None


class Judges:
    """All judges of a daemon; `spec` is a worker's, so that both compile alike.  For the event loop."""

    def __init__(self, template: TemplateProcess, spec: WorkerSpec, cpu_s: float) -> None:
        self._template = template
        self._spec = spec
        self._cpu_s = cpu_s
        self._cases: dict[tuple[str, bytes], _Case] = {}
        self._queue: JudgeQueue[_Case] = JudgeQueue()
        self._allowance = Allowance(cpu_s)
        self._judges: dict[JudgeProcess, _Case | None] = {}
        self._idle: list[JudgeProcess] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._all_ended: asyncio.Future[None] | None = None
        """Set once `close` has begun."""
        self._known: collections.OrderedDict[bytes, Ruling] = collections.OrderedDict()
        self._known_bytes = 0

    async def judge(self, constraint: bytes, client: str) -> bytes:
        """Return the constraint as a worker must compile it.

        Raises:
            ConstraintRefused: it is invalid, or cannot be compiled within the budget.
            NoJudge: no process could be started to judge it, or two hardly ran.
        """
        digest = hashlib.sha256(constraint).digest()
        ruling = self._known.get(digest)
        now_s = asyncio.get_running_loop().time()
        if ruling is not None and self._allowance.spend(client, ruling.verdict.cpu_s, now_s):
            self._known.move_to_end(digest)
        else:
            ruling = await self._wait(self._case(client, digest, constraint))
        if ruling.verdict.refusal:
            raise ConstraintRefused(ruling.verdict.refusal, ruling.verdict.code)
        return ruling.constraint

    async def close(self) -> None:
        """Kill all judges, and return once they are gone.  No call may wait for a ruling any more."""
        self._all_ended = asyncio.get_running_loop().create_future()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for judge in self._judges:
            judge.kill()
        if self._judges:
            await self._all_ended

    def _case(self, client: str, digest: bytes, constraint: bytes) -> _Case:
        case = self._cases.get((client, digest))
        if case is None:
            case = self._cases[client, digest] = _Case(client, digest, constraint)
            self._queue.add(client, case)
            self._dispatch()
        return case

    async def _wait(self, case: _Case) -> Ruling:
        case.waiting += 1
        try:
            return await asyncio.shield(case.ruling)
        finally:
            case.waiting -= 1
            if not case.waiting and not case.ruling.done():
                self._abandon(case)

    def _abandon(self, case: _Case) -> None:
        del self._cases[case.client, case.digest]
        self._queue.remove(case.client, case)
        case.ruling.cancel()
        if case.judge is not None:
            case.judge.kill()

    # -- judges -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out waiting constraints; start a judge if one more is needed."""
        while self._idle and (taken := self._queue.take()) is not None:
            _, case = taken
            judge = case.judge = self._idle.pop()
            self._judges[judge] = case
            judge.ask(case.constraint, self._cpu_s)
            loop = asyncio.get_running_loop()
            case.deadline = loop.call_later(WALL_FACTOR * self._cpu_s, self._overdue, case)
        starting = len(self._judges) - len(self._idle) - sum(case is not None for case in self._judges.values())
        if self._queue.ready > starting and len(self._judges) < SEATS and self._all_ended is None:
            judge = JudgeProcess(self._ready, self._ruled, self._ended)
            self._judges[judge] = None
            starting_one = judge.start(self._template, self._spec)
            task = asyncio.get_running_loop().create_task(starting_one, name="start a judge")
            self._starting.add(task)
            task.add_done_callback(partial(self._started, judge))

    def _overdue(self, case: _Case) -> None:
        case.is_overdue = True
        if case.judge is not None:
            case.judge.kill()

    def _started(self, judge: JudgeProcess, task: asyncio.Task[None]) -> None:
        """Count a judge that could not be started as ended: no descriptor is left, or it met a bug."""
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            is_bug = not isinstance(error, OSError)
            log.warning("cannot start a judge of output constraints: %s", error, exc_info=error if is_bug else None)
            self._ended(judge, 1)

    def _ready(self, judge: JudgeProcess) -> None:
        self._failed_starts = 0
        self._idle.append(judge)
        self._dispatch()

    def _ruled(self, judge: JudgeProcess, verdict: Verdict, payload: list[bytes]) -> None:
        case = self._judges[judge]
        if case is None or case.ruling.done() or case.is_overdue:  # the judge has been killed, and ends in a moment
            return
        self._leave(judge)
        self._judges[judge] = None
        self._idle.append(judge)
        self._settle(case, Ruling(verdict, payload[0] if payload else b""))
        self._dispatch()

    def _ended(self, judge: JudgeProcess, exit_code: int | None) -> None:
        case = self._leave(judge)
        was_idle = judge in self._idle
        del self._judges[judge]
        if self._all_ended is not None and not self._judges:
            self._all_ended.set_result(None)
        if was_idle:
            self._idle.remove(judge)
        elif case is None:
            self._start_failed()
        else:
            self._died_of(case, exit_code)
        self._dispatch()

    def _died_of(self, case: _Case, exit_code: int | None) -> None:
        """Blame the constraint, unless its judge was killed from outside or has hardly run: another tries it, once."""
        is_innocent = case.is_overdue or exit_code in (None, -signal.SIGKILL)  # None: it cannot be known
        case.deaths += is_innocent
        if is_innocent and case.deaths == 1 and not case.ruling.done():
            case.judge, case.is_overdue = None, False
            self._queue.add(case.client, case)
            return
        if case.is_overdue:
            self._fail(case)
            return
        why = f"it cannot be compiled within {self._cpu_s:g} s of CPU time and {MEMORY_BYTES >> 20} MiB"
        self._settle(case, Ruling(Verdict(refusal=why, code="constraint_too_complex")), is_lasting=not is_innocent)

    def _leave(self, judge: JudgeProcess) -> _Case | None:
        case = self._judges[judge]
        if case is not None:
            assert case.deadline is not None
            case.deadline.cancel()
            self._queue.done(case.client)
        return case

    def _settle(self, case: _Case, ruling: Ruling, is_lasting: bool = True) -> None:
        if case.ruling.done():  # abandoned meanwhile
            return
        del self._cases[case.client, case.digest]
        case.ruling.set_result(ruling)
        if not is_lasting or case.digest in self._known:
            return
        self._known[case.digest] = ruling
        self._known_bytes += len(ruling.constraint)
        while self._known_bytes > MAX_KNOWN_BYTES or len(self._known) > MAX_KNOWN_BYTES >> 10:
            _, forgotten = self._known.popitem(last=False)
            self._known_bytes -= len(forgotten.constraint)

    def _start_failed(self) -> None:
        self._failed_starts += 1
        if self._failed_starts < MAX_FAILED_STARTS:
            return
        self._failed_starts = 0
        log.error("cannot start any judge of output constraints: failing the requests that wait for one")
        while (taken := self._queue.take()) is not None:
            client, case = taken
            self._queue.done(client)
            self._fail(case)

    def _fail(self, case: _Case) -> None:
        if not case.ruling.done():
            del self._cases[case.client, case.digest]
            case.ruling.set_exception(NoJudge())
