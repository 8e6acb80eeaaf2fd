"""The policy `mell-slo`: the fewest workers on which every request gets its first token and its pace in time.

    demand     how many workers are in service, from memory, prompts and steps; woken before any is full
    dispatch   spread inside the service: an awake GPU costs the same full or not
    retention  within the service a worker stays; beyond it, ski rental on how soon so many were needed again
    feedback   ended requests that were late or slow make the plan more careful
    overflow   moved away as by `mell-plus`

Without targets it is `mell-plus`.  What a step and a prompt cost is learned from `WorkersPaced`.
"""

from collections.abc import Iterator
from typing import ClassVar

from melld.scheduler.cluster import Cluster
from melld.scheduler.events import RequestFinished, WorkerPace
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.slo.demand import Demand
from melld.scheduler.policies.slo.feedback import Feedback
from melld.scheduler.policies.slo.load import Loads
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.policies.slo.rental import Rental
from melld.scheduler.policy import Policy
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker
from melld.scheduler.targets import Targets

AHEAD_S = 3.0
"""Growth of a worker's requests that a prediction of its steps includes."""
TTFT_PART = 0.8
"""Part of the time until the first token that a placement may plan to use."""
LARGE_PART = 0.08
"""Mean size, as a part of the capacity, above which requests are packed where memory sets the number of workers."""
WORTH_WAKING = 4.0
"""Misses that waking another worker must save."""
MOST_BUSY = 0.9


class MellSlo(Policy):
    """Policy `mell-slo`; see the module."""

    name: ClassVar[str] = "mell-slo"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.packing = MellPlus(cluster)
        self.targets = cluster.settings.targets or Targets()
        self.steps = StepModel()
        self.prompts = PromptModel()
        self.loads = Loads()
        self.demand = Demand(cluster, self.steps)
        self.rental = Rental()
        self.feedback = Feedback(self.targets)
        self._aims = cluster.settings.targets is not None and not cluster.settings.instant_moves

    # ---- dispatch

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        if not self._aims:
            return self.packing.allocate(request, reason)
        self._serve(request, reason)
        prefill_s = self.prompts.seconds(request.prompt_tokens)
        worker = self._able(request, prefill_s) or self._least_missed(request, prefill_s, reason)
        if worker is None:
            worker = self.spare(request.kv_bytes, reason) or self.packing.fitting(request)
        if worker is None:
            return False
        self.cluster.assign(request, worker, reason)
        self.demand.accept(prefill_s)
        now_s = self.cluster.now_s
        load = self.loads.of(worker, now_s)
        load.accept(prefill_s, max(now_s, load.free_s) + prefill_s, now_s)
        return True

    def _serve(self, request: Request, reason: Reason) -> None:
        """Wake the workers that the load needs and does not have."""
        self.demand.look(self._planned_itl_s(), self._wake_s())
        while len(self.cluster.active) < self.demand.workers:
            if self.spare(request.kv_bytes, reason) is None:
                return

    def _planned_itl_s(self) -> float | None:
        itl_s = self._promised_itl_s()
        return None if itl_s is None else itl_s * self.feedback.margin

    def _promised_itl_s(self) -> float | None:
        return self.targets.pace_s(self.steps.lone_step_s())

    def _wake_s(self) -> float:
        asleep = self.cluster.sleeping(0)
        return asleep.wake_s if asleep is not None else 0.0

    def _able(self, request: Request, prefill_s: float) -> Worker | None:
        """Return the best worker that serves the request within both targets, in service before others."""
        serving = self.demand.workers
        packed = self.demand.by_memory and self._mean_bytes() > LARGE_PART * self.cluster.largest_capacity_bytes()
        best_cost, best = float("inf"), None
        beyond: Worker | None = None
        for place, worker in enumerate(self._by_activation()):
            cost = self._cost(request, worker, prefill_s)
            if cost is None:
                continue
            if place >= serving:
                if beyond is None or worker.used_bytes > beyond.used_bytes:
                    beyond = worker
                continue
            if packed:
                cost = -float(worker.used_bytes)
            if cost < best_cost:
                best_cost, best = cost, worker
        return best or beyond

    def _by_activation(self) -> list[Worker]:
        return sorted(self.cluster.active.values(), key=lambda worker: worker.order)

    def _mean_bytes(self) -> float:
        active = self.cluster.active.values()
        return sum(worker.used_bytes for worker in active) / max(sum(worker.count for worker in active), 1)

    def _cost(self, request: Request, worker: Worker, prefill_s: float) -> float | None:
        """Return how near the worker comes to a target with the request, or None if it misses one or has no room."""
        outlook = self.packing.outlook
        if worker is request.worker or not outlook.takes(worker, request.kv_bytes):
            return None
        if worker.count and outlook.life_s(worker, request.kv_bytes, 1) < self.packing.settings.dispatch_life_s:
            return None
        wait_s = self._ttft_s(request, worker, prefill_s)
        allowed_s = self.targets.first_token_s(prefill_s)
        if wait_s > TTFT_PART * allowed_s:
            return None
        cost = wait_s / allowed_s
        itl_s = self._planned_itl_s()
        if itl_s is not None:
            slow = self._itl_s(worker, request.kv_bytes, prefill_s) / itl_s
            if slow > 1.0:
                return None
            cost = max(cost, slow)
        return cost

    def _ttft_s(self, request: Request, worker: Worker, prefill_s: float) -> float:
        now_s = self.cluster.now_s
        return max(self.loads.of(worker, now_s).free_s, now_s) + prefill_s - request.arrived_s

    def _itl_s(self, worker: Worker, kv_bytes: int, prefill_s: float) -> float:
        """Return the predicted time between tokens with one more request."""
        count = worker.count - worker.leaving + 1
        used_bytes = worker.used_bytes - worker.leaving_bytes + kv_bytes
        ahead_bytes = AHEAD_S * count * self.packing.outlook.growth_bytes_s(worker)
        prefilling = self.loads.of(worker, self.cluster.now_s).prefilling(self.cluster.now_s) + prefill_s / 10.0
        step_s = self.steps.step_s(worker, count, used_bytes + ahead_bytes)
        return step_s / (1.0 - min(prefilling, MOST_BUSY))

    def _least_missed(self, request: Request, prefill_s: float, reason: Reason) -> Worker | None:
        """Return the worker on which the fewest requests will miss a target; wake one if that saves several."""
        takers = self._takers(request)
        scored = [(self._missed(request, worker, prefill_s), worker.order, worker) for worker in takers]
        least = min(scored, default=None)
        if least is None:
            return None
        waking = any(worker.wake_s for worker in self.cluster.active.values())
        if least[0] >= WORTH_WAKING and not waking and (worker := self.spare(request.kv_bytes, reason)) is not None:
            return worker
        return least[2]

    def _takers(self, request: Request) -> Iterator[Worker]:
        for worker in self.cluster.active.values():
            if worker is not request.worker and self.packing.outlook.takes(worker, request.kv_bytes):
                yield worker

    def _missed(self, request: Request, worker: Worker, prefill_s: float) -> float:
        late = self._ttft_s(request, worker, prefill_s) > self.targets.first_token_s(prefill_s)
        itl_s = self._planned_itl_s()
        if itl_s is None:
            return float(late)
        slow = self._itl_s(worker, request.kv_bytes, prefill_s) / itl_s - 1.0
        return late + (worker.count + 1) * min(1.0, max(0.0, 2.0 * slow))

    # ---- facts

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:
        """See `Policy.departed`."""
        self.packing.departed(request, worker, destination)

    def served(self, request: Request, event: RequestFinished) -> None:
        """See `Policy.served`."""
        if event.first_token_s > 0.0:
            prefill_s = self.prompts.seconds(request.prompt_tokens)
            self.feedback.started(event.first_token_s - request.arrived_s, prefill_s)
            self.feedback.ended(event.at_s - event.first_token_s, event.output_tokens, self._promised_itl_s())

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:
        """See `Policy.moved`."""
        self.packing.moved(request, source, destination)

    def paced(self, paces: dict[Worker, WorkerPace]) -> None:
        """See `Policy.paced`."""
        for worker, pace in paces.items():
            self.steps.observe(worker, pace)
            self.prompts.observe(pace)

    # ---- the epoch

    def epoch(self) -> None:
        """See `Policy.epoch`."""
        if not self._aims:
            self.packing.epoch()
            return
        self.packing.relieve()
        self.demand.look(self._planned_itl_s(), self._wake_s())
        occupied = sum(1 for worker in self.cluster.active.values() if worker.count)
        self.rental.needed(max(self.demand.workers, occupied), self.cluster.now_s)
        while len(self.cluster.active) < self.demand.workers:
            if self.spare(0, Reason.SERVICE) is None:
                return

    def lets_sleep(self, worker: Worker, after_s: float) -> bool:
        """See `Policy.lets_sleep`."""
        if not self._aims:
            return super().lets_sleep(worker, after_s)
        if (
            worker.wake_s
            and worker.order >= 0
            and self.cluster.now_s < self.loads.of(worker, self.cluster.now_s).free_s
        ):
            return False
        level = sum(1 for one in self.cluster.active.values() if one.order <= worker.order)
        if level <= self.demand.workers:
            return False
        now_s = self.cluster.now_s
        price_s = self._wake_s() + self.feedback.price_s
        return self.rental.since_s(level, now_s) >= self.rental.keep_s(level, price_s)
