"""Chooses the worker for a request: the one where the fewest requests will miss a target, this one included.

    able      it has room for the request's growth, the first token comes well in time, its steps stay within the pace
    cost      the requests there that the prompt is expected to slow beyond their pace, and how near both targets are
    serving   only workers in service, spread; where none of those is able, or all would slow others much, the fullest
              able one beyond

An awake GPU costs the same full or not, hence the spread.  Only where memory sets the number of workers and requests
are large, the fullest able worker is best: spread evenly, none would have room for the next large one.
Never wakes a worker.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from melld.ids import RequestId, WorkerId
from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.slo import constants
from melld.scheduler.policies.slo.answers import Answers
from melld.scheduler.policies.slo.load import Loads, Turn
from melld.scheduler.policies.slo.models import StepModel
from melld.scheduler.state import Request, Worker
from melld.scheduler.targets import DEFAULT_ITL_S, Targets


class Prompt(NamedTuple):
    """Seconds to compute a request's prompt: by itself, and where a worker has its beginning already."""

    alone_s: float
    by_worker_s: Mapping[WorkerId, float]

    def left_s(self, worker: Worker) -> float:
        """Return the seconds of what the worker must compute."""
        return self.by_worker_s.get(worker.id, self.alone_s)


NO_PROMPT = Prompt(0.0, {})


class Dispatch:
    """The choice of a worker for one cluster's requests."""

    def __init__(self, cluster: Cluster, packing: MellPlus, targets: Targets, steps: StepModel) -> None:
        self.answers = Answers()
        self.loads = Loads()
        self._cluster = cluster
        self._packing = packing
        self._targets = targets
        self._steps = steps

    def able(self, request: Request, prompt: Prompt, serving: int, by_memory: bool) -> Worker | None:
        """Return the best of the first `serving` workers that keep both targets, else the fullest of the others.

        So too where the best would slow others much and that one would not.  Where a worker may have the prompt's
        beginning, only those count on which the first token comes about as soon as anywhere.
        """
        by_activation = sorted(self._cluster.active.values(), key=lambda worker: worker.order)
        if request.urgent:
            serving = len(by_activation)
        costs = ((worker, self._cost(request, worker, prompt)) for worker in by_activation[:serving])
        able = [(worker, cost) for worker, cost in costs if cost is not None]
        best = self._best(request, prompt, able, by_memory)
        fullest_first = sorted(by_activation[serving:], key=lambda worker: -worker.used_bytes)
        costs = ((worker, self._cost(request, worker, prompt)) for worker in fullest_first)
        beyond = next(((worker, cost) for worker, cost in costs if cost is not None), None)
        if best is None or (beyond is not None and beyond[1] < best[1] - constants.SPILL):
            best = beyond
        return best and best[0]

    def _best(
        self, request: Request, prompt: Prompt, able: list[tuple[Worker, float]], by_memory: bool
    ) -> tuple[Worker, float] | None:
        """Return the best of the able workers, with its cost."""
        packed = by_memory and self._mean_bytes() > constants.LARGE_PART * self._cluster.roster.largest_capacity_bytes
        if prompt.by_worker_s and able:
            first_s = {worker.id: self._first_s(request, worker, prompt) for worker, _ in able}
            least_s = min(first_s.values())
            soon_s = least_s + max(DEFAULT_ITL_S, constants.SPREAD * least_s)
            able = [one for one in able if first_s[one[0].id] <= soon_s]

        def rank(one: tuple[Worker, float]) -> tuple[bool, float]:
            worker, cost = one
            is_packed = packed and not request.urgent
            return self._crowds(request, worker, prompt), -float(worker.used_bytes) if is_packed else cost

        return min(able, key=rank, default=None)

    def least_costly(self, request: Request, workers: Iterable[Worker]) -> Worker | None:
        """Return the best of these workers for a request whose prompt is, or will be, computed elsewhere."""
        costs = ((self._cost(request, worker, NO_PROMPT), worker) for worker in workers)
        found = [(cost, worker.order, worker) for cost, worker in costs if cost is not None]
        return min(found)[2] if found else None

    def keeps_first_token(self, request: Request, worker: Worker, prompt: Prompt) -> bool:
        """Return True if the worker has room, and the first token comes well in time there."""
        if not self._cluster.fits(worker, request.kv_bytes):
            return False
        return self._near(request, worker, prompt) <= constants.TTFT_PART

    def least_missed(self, request: Request, prompt: Prompt) -> tuple[float, Worker | None]:
        """Return the worker with room on which the fewest requests should miss a target, and how many those are."""
        takes, active = self._packing.outlook.takes, self._cluster.active.values()
        awake_s = max(map(self._packing.outlook.wakes_s, active), default=0.0)
        takers = (worker for worker in active if worker is not request.worker and takes(worker, request.kv_bytes))
        best: tuple[float, int, float, Worker | None] = min(
            (
                (missed * self._weight(request, worker), worker.order, missed, worker)
                for worker in takers
                for missed in [self._missed(request, worker, prompt, awake_s)]
            ),
            default=(0.0, 0, 0.0, None),
        )
        return best[2:]

    def too_late(self, request: Request, prefill_s: float) -> bool:
        """Return True if the waiting request's first token could not come in time on an idle worker."""
        waited_s = self._cluster.now_s - request.arrived_s
        allowed_s = constants.TTFT_PART * self._targets.first_token_s(prefill_s)
        return not has_begun(request) and waited_s + prefill_s > allowed_s

    def pace_s(self) -> float | None:
        """Return the time between tokens to plan for, if any."""
        return self._targets.aimed_pace_s(self._steps.lone_step_s())

    def placing(self, request: Request, worker: Worker, prompt: Prompt) -> None:
        """Note that the worker accepts the request's prompt now."""
        now_s, turn = self._cluster.now_s, self._turn(request, prompt)
        later_s = 0.0 if has_begun(request) else self._targets.later_s(prompt.alone_s)
        self.loads.of(worker, now_s).accept(request.id, prompt.left_s(worker), now_s, turn, later_s)

    def moved(self, request: RequestId, source: Worker, destination: Worker) -> None:
        """Note that the request runs on the destination now, with the delay that it had on the source."""
        now_s = self._cluster.now_s
        delay_s, first_s = self.loads.of(source, now_s).release(request) or (0.0, now_s)
        self.loads.of(destination, now_s).adopt(request, delay_s, first_s)

    def left(self, request: RequestId, workers: Iterable[Worker | None]) -> None:
        """Note that the request has ended."""
        for worker in workers:
            if worker is not None:
                self.loads.of(worker, self._cluster.now_s).release(request)

    def _mean_bytes(self) -> float:
        active = self._cluster.active.values()
        return sum(worker.used_bytes for worker in active) / max(sum(worker.count for worker in active), 1)

    def _cost(self, request: Request, worker: Worker, prompt: Prompt) -> float | None:
        """Return what the request costs on the worker, or None if the worker is not able."""
        outlook, enough_s = self._packing.outlook, self._packing.settings.dispatch_life_s
        if worker is request.worker or not outlook.takes(worker, request.kv_bytes):
            return None
        if worker.count and outlook.life_s(worker, request.kv_bytes, 1) < enough_s:
            return None
        prefill_s = prompt.left_s(worker)
        near = self._near(request, worker, prompt)
        if near > constants.TTFT_PART or self._made_late(request, worker, prompt):
            return None
        if (itl_s := self.pace_s()) is None:
            return near
        slow = self._itl_s(worker, request.kv_bytes, prefill_s) / itl_s
        if slow > 1.0:
            return None
        likes = worker.urgent if request.urgent else worker.count - worker.urgent
        others = (worker.count - likes) / max(worker.count, 1)
        if request.urgent:
            return near + constants.SPREAD * (slow + others)
        return constants.SPREAD * (max(near, slow) + constants.URGENT * others) + self._slowed(worker, prefill_s, itl_s)

    def _crowds(self, request: Request, worker: Worker, prompt: Prompt) -> bool:
        """Return True if the request would take of the headroom of urgent ones on the worker: room, slots or pace."""
        if request.urgent or not worker.urgent:
            return False
        if self._packing.outlook.crowds(request, worker):
            return True
        itl_s, left = self.pace_s(), 1.0 - self._cluster.settings.priorities.headroom
        return itl_s is not None and self._itl_s(worker, request.kv_bytes, prompt.left_s(worker)) > left * itl_s

    @staticmethod
    def _weight(request: Request, worker: Worker) -> float:
        """Return how much a miss on the worker counts, by the part of its requests that are urgent.

        Were it all the same how many these are, the others would crowd together so as to spare the only one.
        """
        return 1.0 if request.urgent else 1.0 + constants.URGENT * worker.urgent / max(worker.count, 1)

    def _missed(self, request: Request, worker: Worker, prompt: Prompt, awake_s: float) -> float:
        """Return how many requests should miss a target where no worker is able: all, where steps are half too slow.

        `awake_s`: until then no worker that wakes takes any from here, and those that do not fit are preempted.
        """
        late = self._overflowing(request, worker, awake_s)
        late += (self._near(request, worker, prompt) > 1.0) + self._made_late(request, worker, prompt)
        if (itl_s := self.pace_s()) is None:
            return late
        slow = self._itl_s(worker, request.kv_bytes, prompt.left_s(worker)) / itl_s - 1.0
        return late + (worker.count + 1) * min(1.0, max(0.0, 2.0 * slow))

    def _overflowing(self, request: Request, worker: Worker, awake_s: float) -> float:
        """Return how many requests of mean size the worker lacks room for by then, with this one and if none ends."""
        outlook, count = self._packing.outlook, worker.count - worker.leaving + 1
        kv_bytes = worker.used_bytes - worker.leaving_bytes + request.kv_bytes
        grows_s = max(awake_s - outlook.wakes_s(worker), 0.0)
        lacking_bytes = kv_bytes + count * outlook.growth_bytes_s(worker) * grows_s - worker.capacity_bytes
        return count * max(lacking_bytes, 0.0) / max(kv_bytes, 1)

    def _near(self, request: Request, worker: Worker, prompt: Prompt) -> float:
        """Return the part of the time until its first token that the request should use; since its arrival, if new."""
        waited_s = 0.0 if has_begun(request) else self._cluster.now_s - request.arrived_s
        return (waited_s + self._first_s(request, worker, prompt)) / self._targets.first_token_s(prompt.alone_s)

    def _first_s(self, request: Request, worker: Worker, prompt: Prompt) -> float:
        """Return in what time the worker would have computed the prompt."""
        now_s, turn = self._cluster.now_s, self._turn(request, prompt)
        return self.loads.of(worker, now_s).ahead_s(turn, now_s) + prompt.left_s(worker)

    def _made_late(self, request: Request, worker: Worker, prompt: Prompt) -> int:
        """Return how many of the worker's first tokens would miss their target behind the prompt."""
        now_s, turn = self._cluster.now_s, self._turn(request, prompt)
        return self.loads.of(worker, now_s).made_late(turn, prompt.left_s(worker), now_s)

    def _turn(self, request: Request, prompt: Prompt) -> Turn:
        """Return the prompt's turn among those of a worker, as `engine.worker.residency.budget` has it."""
        due_s = 0.0 if has_begun(request) else self._targets.first_token_s(prompt.alone_s)
        return not request.urgent, request.arrived_s + due_s

    def _itl_s(self, worker: Worker, kv_bytes: int, prefill_s: float) -> float:
        """Return the predicted time between tokens with one more request."""
        now_s, count = self._cluster.now_s, worker.count - worker.leaving + 1
        used_bytes = worker.used_bytes - worker.leaving_bytes + kv_bytes
        ahead_bytes = constants.AHEAD_S * count * self._packing.outlook.growth_bytes_s(worker)
        prefilling = self.loads.of(worker, now_s).prefilling(now_s) + prefill_s / constants.ACCEPTED_S
        step_s = self._steps.step_s(worker, count, used_bytes + ahead_bytes)
        return step_s / (1.0 - min(prefilling, constants.MOST_BUSY))

    def _slowed(self, worker: Worker, prefill_s: float, itl_s: float) -> float:
        """Return how many requests on the worker the prompt should make miss their pace."""
        now_s, slowed = self._cluster.now_s, 0.0
        step_s = self._steps.step_s(worker, worker.count, worker.used_bytes)
        if not 0.0 < step_s < itl_s:
            return 0.0
        gain_s = itl_s - step_s
        for delay_s, decoded_s in self.loads.of(worker, now_s).delays(now_s):
            had_tokens = decoded_s / step_s
            if delay_s + prefill_s > had_tokens * gain_s:
                slowed += self.answers.made_slow(delay_s, prefill_s, had_tokens, gain_s)
        return slowed


def has_begun(request: Request) -> bool:
    """Return True if the request had a worker before, and may have shown its client tokens."""
    return request.placed_s > float("-inf")
