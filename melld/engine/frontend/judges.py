"""The judges: processes that compile output constraints before a worker does, and that can be killed.

Owns the judges, who may use them when, and their recent rulings.  A judge is started when it is first needed.

    constraint ─► known? ─► the client's turn ─► a seat ─► judge ─► verdict      over budget, or client gone ─► killed

A client has one constraint at a judge at a time, so one client's heavy constraints cannot occupy both judges.
"""

import asyncio
import collections
import contextlib
import hashlib
import logging
import weakref

import msgspec

from melld.engine.frontend.allowance import Allowance
from melld.engine.frontend.judge_process import JudgeEnded, JudgeProcess
from melld.engine.host.template import TemplateProcess
from melld.engine.wire.judge import MEMORY_BYTES, Verdict
from melld.engine.wire.spec import WorkerSpec
from melld.errors import ConstraintRefused, NoJudge

log = logging.getLogger("melld.judges")
SEATS = 2
STOPPED_FACTOR = 5
"""How long a judge may stand still before it is replaced, as a multiple of its CPU time: a slow one goes on."""
MAX_STARTS = 3
MAX_KNOWN_BYTES = 16 << 20


class Ruling(msgspec.Struct, frozen=True):
    """A verdict, and the constraint as a worker must compile it."""

    verdict: Verdict
    at_s: float
    constraint: bytes = b""


class Judges:
    """All judges of a daemon; `spec` is a worker's, so that both compile alike.  For the event loop."""

    def __init__(self, template: TemplateProcess, spec: WorkerSpec, cpu_s: float) -> None:
        self._template = template
        self._spec = spec
        self._cpu_s = cpu_s
        self._allowance = Allowance(cpu_s)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._seats = asyncio.Semaphore(SEATS)
        self._judges: dict[asyncio.Future[int | None], JudgeProcess] = {}
        self._idle: list[JudgeProcess] = []
        self._known: collections.OrderedDict[bytes, Ruling] = collections.OrderedDict()
        self._known_bytes = 0

    async def judge(self, constraint: bytes, client: str) -> bytes:
        """Return the constraint as a worker must compile it.

        Raises:
            ConstraintRefused: it is invalid, or cannot be compiled within the budget.
            NoJudge: no process could be started to judge it, or two stood still.
        """
        digest = hashlib.sha256(constraint).digest()
        asked_s = asyncio.get_running_loop().time()
        ruling = self._known.get(digest)
        if ruling is not None and self._allowance.spend(client, ruling.verdict.cpu_s, asked_s):
            self._known.move_to_end(digest)
        else:
            async with self._turns.setdefault(client, asyncio.Lock()):
                ruling = self._known.get(digest)
                if ruling is None or ruling.at_s < asked_s:
                    async with self._seats:
                        ruling = await self._rule(digest, constraint)
        if ruling.verdict.refusal:
            raise ConstraintRefused(ruling.verdict.refusal, ruling.verdict.code)
        return ruling.constraint

    async def close(self) -> None:
        """Kill all judges, and return once they are gone.  No call may still be waiting for one."""
        for judge in self._judges.values():
            judge.kill()
        await asyncio.gather(*self._judges)

    async def _rule(self, digest: bytes, constraint: bytes) -> Ruling:
        """Blame the constraint for the end of its judge, unless that was killed or stood still: then retry it once."""
        for is_last in (False, True):
            try:
                verdict, payload = await self._compile(constraint)
            except TimeoutError:
                continue
            except JudgeEnded as ended:
                if ended.was_killed and not is_last:
                    continue
                why = f"cannot be compiled within {self._cpu_s:g} s of CPU time and {MEMORY_BYTES >> 20} MiB"
                verdict, payload = Verdict(refusal=why, code="constraint_too_complex"), []
                is_lasting = not ended.was_killed
            else:
                is_lasting = True
            ruling = Ruling(verdict, asyncio.get_running_loop().time(), *payload)
            if is_lasting:
                self._remember(digest, ruling)
            return ruling
        raise NoJudge

    async def _compile(self, constraint: bytes) -> tuple[Verdict, list[bytes]]:
        judge = await self._free_judge()
        with contextlib.ExitStack() as undo:
            undo.callback(judge.kill)
            answer = await judge.compile(constraint, self._cpu_s, STOPPED_FACTOR * self._cpu_s)
            undo.pop_all()
        self._idle.append(judge)
        return answer

    async def _free_judge(self) -> JudgeProcess:
        while self._idle:
            if not (judge := self._idle.pop()).ended.done():
                return judge
        for _ in range(MAX_STARTS):
            judge = JudgeProcess()
            self._judges[judge.ended] = judge
            judge.ended.add_done_callback(self._judges.pop)
            try:
                await judge.start(self._template, self._spec)
            except (OSError, JudgeEnded) as error:  # for example, no descriptor is left
                log.warning("cannot start a judge for output constraints: %s", error)
            else:
                return judge
        log.error("cannot start any judge for output constraints: failing the request waiting for it")
        raise NoJudge

    def _remember(self, digest: bytes, ruling: Ruling) -> None:
        if (earlier := self._known.pop(digest, None)) is not None:
            self._known_bytes -= len(earlier.constraint)
        self._known[digest] = ruling
        self._known_bytes += len(ruling.constraint)
        while self._known_bytes > MAX_KNOWN_BYTES or len(self._known) > MAX_KNOWN_BYTES >> 10:
            _, forgotten = self._known.popitem(last=False)
            self._known_bytes -= len(forgotten.constraint)
