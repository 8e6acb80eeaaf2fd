"""Roles of the workers: which compute prompts, which decode, and which requests are handed over.

    split     for a while mixed workers would use more of the pace than may be planned, and some split is 5 % better
    merge     for a while they would use no more of it than prompts may of a worker's time, or no split is that much
              better; at once below two workers
    new       to the prefill worker with the shortest backlog; where its first token would be late, as without roles
    hand-over after the first token; the destination is chosen as late as the copy allows, and anew while none is able

`roles.pressure` has the arithmetic; the pause of a hand-over is learned from those of late, and a step without any.
One worker changes per look, on the machine where most others decode the one with the fewest bytes; what it decodes
leaves a few at a time.
Without another on its machine a worker stays mixed: KV is handed over within one.  Nobody is woken for a role: the
number in service is `demand`'s, as if all were mixed.  Owns the roles; never assigns a request.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from melld.ids import RequestId, WorkerId
from melld.scheduler.cluster import Cluster
from melld.scheduler.events import SetRole
from melld.scheduler.policies.plus.outlook import CAUTION, MoveTimes, Outlook
from melld.scheduler.policies.plus.policy import LEAVERS
from melld.scheduler.policies.slo import constants
from melld.scheduler.policies.slo.answers import Answers
from melld.scheduler.policies.slo.load import Loads, WorkerLoad
from melld.scheduler.policies.slo.models import StepModel
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role, best_split, pressure
from melld.scheduler.state import Request, Worker


class Roles:
    """Roles of one cluster's workers; all are mixed at first.

    `wanted`: how many should be prefill workers.  `because`: why, in words.
    """

    def __init__(self, cluster: Cluster, outlook: Outlook, steps: StepModel, loads: Loads, answers: Answers) -> None:
        self.wanted = 0
        self.because = "as configured" if cluster.settings.roles.fixed else ""
        self._cluster = cluster
        self._outlook = outlook
        self._steps = steps
        self._loads = loads
        self._answers = answers
        self._pauses = MoveTimes()
        self._handed: set[RequestId] = set()  # on their way
        self._arrived: dict[RequestId, tuple[int, float]] = {}  # with how many bytes, and when
        self._fixed = cluster.settings.roles.fixed
        self._prefill: dict[WorkerId, int] = {}  # with the activation for which the worker has the role
        self._told: dict[WorkerId, Role] = {}
        self._stood_s = self._learned_s = -math.inf
        self._epoch_s = self._looked_s = 0.0

    def of(self, worker: Worker) -> Role:
        """Return the worker's role."""
        if self._fixed:
            return self._fixed.get(worker.id, Role.MIXED)
        if self._prefill.get(worker.id) == worker.order:
            return Role.PREFILL
        return Role.DECODE if self._prefill else Role.MIXED

    def prefill_workers(self) -> list[Worker]:
        """Return the workers that compute prompts."""
        if not self._fixed and not self._prefill:
            return []
        return [worker for worker in self._cluster.active.values() if self.of(worker) is Role.PREFILL]

    def takers(self) -> Iterator[list[Worker]]:
        """Yield the workers to which requests are handed over: those that decode, then mixed ones."""
        awake = [worker for worker in self._cluster.active.values() if not worker.wake_s]
        for role in (Role.DECODE, Role.MIXED):
            yield [worker for worker in awake if self.of(worker) is role]

    def for_prompt(self) -> Worker | None:
        """Return the prefill worker with the shortest backlog."""
        now_s = self._cluster.now_s

        def backlog(worker: Worker) -> tuple[float, int, int]:
            return self._load(worker).backlog_s(now_s), worker.used_bytes, worker.order

        return min(self.prefill_workers(), key=backlog, default=None)

    def leavers(self) -> Iterator[tuple[Request, bool]]:
        """Yield the requests to be handed over now, each with whether its first token is still to come."""
        for worker in self.prefill_workers():
            decoding = 0
            for request in worker.movable:
                to_come = self._first_in_s(request, worker) > 0.0
                decoding += not to_come
                if self.is_due(request, worker) if to_come else decoding <= LEAVERS:
                    yield request, to_come

    def is_due(self, request: Request, worker: Worker) -> bool:
        """Return True if the first token will come so soon that the request's destination must be chosen."""
        looks_s = 2.0 * self._epoch_s  # this one, and the next
        lead_s = CAUTION * self._outlook.moves.expected_s(request.kv_bytes) + looks_s
        return self._first_in_s(request, worker) <= lead_s

    def hands(self, request: Request) -> None:
        """Note that the request will leave its worker after its first token."""
        self._handed.add(request.id)

    def handed(self, request: Request, committed: bool) -> bool:
        """Return True if the request's move, which has ended, was a hand-over."""
        was_handed = request.id in self._handed
        self._handed.discard(request.id)
        if was_handed and committed:
            self._arrived[request.id] = request.kv_bytes, self._cluster.now_s
        return was_handed

    def served(self, request: Request, first_token_s: float) -> None:
        """Learn from an ended request how long its client waited for a hand-over: a late prompt is none of that."""
        kv_bytes, at_s = self._arrived.pop(request.id, (0, 0.0))
        if kv_bytes and first_token_s:
            self._pauses.took(kv_bytes, max(at_s - first_token_s, 0.0))
            self._learned_s = self._cluster.now_s

    def look(self, prompts: float, target_s: float | None) -> None:
        """Split or merge, where prompts take so many seconds per second."""
        now_s = self._cluster.now_s
        self._epoch_s, self._looked_s = now_s - self._looked_s, now_s
        self._arrived = {name: one for name, one in self._arrived.items() if name in self._cluster.requests}
        if self._fixed or not self._cluster.settings.roles.auto:
            return
        awake = {worker.id: worker for worker in self._cluster.active.values() if not worker.wake_s}
        self._prefill = {name: order for name, order in self._prefill.items() if name in awake}
        places = Counter(map(self._place, awake.values()))
        if target_s is None or max(places.values(), default=0) < 2 or not self._steps.known:
            self.wanted, self._stood_s = 0, now_s
            self.because = "fewer than two workers of a machine are computing, or no ITL target is set"
        else:
            self._want(self._best(awake.values(), prompts, target_s))
            self.wanted = min(self.wanted, len(awake) - 1)
        while len(self._prefill) > self.wanted:
            self._prefill.popitem()
        decoding = places - Counter(self._place(awake[name]) for name in self._prefill)
        self._prefill = {name: order for name, order in self._prefill.items() if decoding[self._place(awake[name])]}
        if len(self._prefill) < self.wanted:
            self._take_one(awake.values(), decoding)
        self._tell(awake.values())

    def _take_one(self, awake: Iterable[Worker], decoding: Counter[int]) -> None:
        """Have one more worker compute prompts if others decode where it is; `decoding`: how many, by place."""
        others = [one for one in awake if one.id not in self._prefill and decoding[self._place(one)] > 1]
        if others:
            chosen = min(others, key=lambda one: (-decoding[self._place(one)], one.used_bytes, one.order))
            self._prefill[chosen.id] = chosen.order

    def _place(self, worker: Worker) -> int:
        """Return where KV can be copied from this worker: its machine's number, or 0 for everywhere."""
        return worker.machine if self._cluster.distances.some_are_far else 0

    def _tell(self, awake: Iterable[Worker]) -> None:
        """Record the roles that have changed."""
        before, self._told = self._told, {worker.id: self.of(worker) for worker in awake}
        for name, role in self._told.items():
            if role is not before.get(name, Role.MIXED):
                self._cluster.record(SetRole(Reason.ROLE, name, role, cause=self._cluster.event))

    def _best(self, awake: Iterable[Worker], prompts: float, target_s: float) -> int:
        """Return how many of these workers had better be prefill workers."""
        workers, now_s = list(awake), self._cluster.now_s
        count = len(workers)
        decodes = sum(self._load(worker).decodes(now_s) for worker in workers)
        used_bytes = sum(worker.used_bytes - worker.leaving_bytes for worker in workers)

        def steps(over: int) -> float:
            return self._steps.step_s(None, decodes / over, used_bytes / over)

        mean_bytes = used_bytes / max(sum(worker.count for worker in workers), 1)
        handing_s = self._pause_s(mean_bytes, steps(count)) * self._answers.share_of_token()
        best = best_split(steps, count, prompts, target_s, handing_s)
        mixed, split = (pressure(steps, count, one, prompts, target_s, handing_s) for one in (0, best))
        pays = split < constants.GAIN * mixed
        self.because = (
            f"mixed, {count} workers would use {mixed:.0%} of the pace; with {best} of them for prompts {split:.0%}"
            if best
            else f"mixed, {count} workers use {mixed:.0%} of the pace, and with any split more"
        )
        return best if pays and mixed > (constants.PROMPT_PART if self.wanted else constants.TTFT_PART) else 0

    def _pause_s(self, kv_bytes: float, step_s: float) -> float:
        """Return how long a client should wait for a hand-over: as for the last ones, or for its taker's step."""
        faded = math.exp((self._learned_s - self._cluster.now_s) / (2.0 * constants.MEAN_S))
        return step_s + (self._pauses.expected_s(kv_bytes) - step_s) * faded

    def _want(self, best: int) -> None:
        """Want what has been best for long enough."""
        now_s = self._cluster.now_s
        if best == self.wanted:
            self._stood_s = now_s
        elif now_s - self._stood_s >= constants.CALM_S:
            self.wanted, self._stood_s = best, now_s

    def _first_in_s(self, request: Request, worker: Worker) -> float:
        """Return in how many seconds the request's first token should come; not above 0: it has come."""
        return self._load(worker).first_s(request.id) - self._cluster.now_s

    def _load(self, worker: Worker) -> WorkerLoad:
        return self._loads.of(worker, self._cluster.now_s)
