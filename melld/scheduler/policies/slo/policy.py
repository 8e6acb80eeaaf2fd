"""The policy `mell-slo`: the fewest workers on which every request gets its first token and its pace in time.

    demand     how many workers are in service, from memory, prompts and steps; woken before any is full
    dispatch   spread inside the service: an awake GPU costs the same full or not
    retention  within the service a worker stays; beyond it, ski rental on how soon so many were needed again: then it
               sleeps, or is emptied by moves so that it may
    feedback   ended requests that were late or slow make the plan more careful
    overflow   moved away as by `mell-plus`

Without targets, and with instant moves, it is `mell-plus`.  Steps and prompts are learned from `WorkersPaced`.
"""

from typing import ClassVar

from melld.scheduler.cluster import Cluster
from melld.scheduler.events import RequestFinished, WorkerPace
from melld.scheduler.idle import Gaps, kept_s
from melld.scheduler.policies.fit import tightest_fit
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.slo import constants
from melld.scheduler.policies.slo.demand import Demand
from melld.scheduler.policies.slo.dispatch import NO_PROMPT, Dispatch, Prompt, has_begun
from melld.scheduler.policies.slo.feedback import Feedback
from melld.scheduler.policies.slo.missing import MissingWorkers
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.policies.slo.roles import Roles
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role
from melld.scheduler.state import Request, Worker
from melld.scheduler.targets import DEFAULT_ITL_S, Targets


class MellSlo(MellPlus):
    """Policy `mell-slo`; see the module."""

    name: ClassVar[str] = "mell-slo"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.targets = cluster.settings.targets or Targets()
        self.steps = StepModel()
        self.prompts = PromptModel()
        self.dispatch = Dispatch(cluster, self, self.targets, self.steps)
        self.demand = Demand(cluster, self.targets, self.steps, self.dispatch.answers)
        self.roles = Roles(cluster, self.outlook, self.steps, self.dispatch.loads, self.dispatch.answers)
        self.gaps = Gaps()  # of workers that are in service, or still have requests
        self.service = Gaps()  # of those in service alone
        self._emptied = -1  # by moves: the order of the last worker
        self.missing = MissingWorkers(cluster)
        self.feedback = Feedback(self.targets, self.missing)
        self._prompt_tokens = self._prompt_bytes = 0  # of all placed
        self._aims = cluster.settings.targets is not None and not cluster.settings.instant_moves

    # ---- requests

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        if not self._aims:
            return super().allocate(request, reason)
        is_new = request.worker is None
        prompt = self._prompt(request) if is_new else self._prompt_elsewhere(request)
        self._serve(request.kv_bytes, reason)
        prefiller = self._prefiller(request, prompt) if is_new else None
        worker = prefiller or self._chosen(request, prompt, reason)
        if worker is None:
            return False
        if is_new:
            self.demand.accept(prompt.left_s(worker), request.kv_bytes)
            self.dispatch.placing(request, worker, prompt)
        self.cluster.assign(request, worker, reason)
        if prefiller is not None and self.roles.is_due(request, prefiller):
            self._hand_over(request, after_first_token=True)
        return True

    def _prefiller(self, request: Request, prompt: Prompt) -> Worker | None:
        """Return the prefill worker for the request's prompt, if its first token comes in time there."""
        worker = self.roles.for_prompt()
        return worker if worker is not None and self.dispatch.keeps_first_token(request, worker, prompt) else None

    def _hand_over(self, request: Request, after_first_token: bool) -> None:
        """Send the request from its prefill worker to one that decodes, if one is able that KV can be sent to."""
        source = request.worker
        assert source is not None, request.id
        for workers in self.roles.takers():
            near = (worker for worker in workers if not self.cluster.distances.is_far(source, worker))
            if (worker := self.dispatch.least_costly(request, near)) is not None:
                if after_first_token:
                    self.roles.hands(request)
                self.cluster.assign(request, worker, Reason.ROLE, after_first_token=after_first_token)
                return

    def _prompt(self, request: Request) -> Prompt:
        """Return the seconds that the request's prompt takes, on each worker that may have its beginning."""
        tokens, seconds = request.prompt_tokens, self.prompts.seconds
        if not has_begun(request):
            self._prompt_tokens += tokens
            self._prompt_bytes += request.kv_bytes
            if not self.cluster.growth.bytes_per_s:
                pace_s = max(self.dispatch.pace_s() or 0.0, DEFAULT_ITL_S)
                self.outlook.expect_growth(self._prompt_bytes / max(self._prompt_tokens, 1) / pace_s)
        left_s = {worker: seconds(max(tokens - cached, 1)) for worker, cached in request.cached_tokens.items()}
        return Prompt(seconds(tokens), left_s)

    def _prompt_elsewhere(self, request: Request) -> Prompt:
        """Return the seconds of what another worker computes if the running request moves there by its tokens."""
        if request.worker is None or not self.cluster.distances.some_are_far:
            return NO_PROMPT
        tokens = request.kv_bytes * self._prompt_tokens // max(self._prompt_bytes, 1)
        near = self.cluster.distances.neighbours(request.worker)
        return Prompt(self.prompts.seconds(tokens), {worker.id: 0.0 for worker in near})

    def _chosen(self, request: Request, prompt: Prompt, reason: Reason) -> Worker | None:
        worker = self.dispatch.able(request, prompt, self.demand.workers, self.demand.by_memory)
        if worker is not None:
            return worker
        missed, worker = self.dispatch.least_missed(request, prompt)
        if worker is not None and (missed < constants.WORTH_WAKING or self._wakes()):
            return None if worker.count and self._holds(request) else worker
        if (woken := self.spare(request.kv_bytes, reason)) is not None:
            return woken
        if self._holds(request):  # an empty worker that it fills has nobody whom it could harm
            return next((one for one in self.cluster.room.tightest(request.kv_bytes) if not one.count), None)
        return worker or tightest_fit(self.cluster, request)

    def _holds(self, request: Request) -> bool:
        """Return True if the request had better wait for an able worker: all compute, and it would harm the others.

        So those that are served are served in time; who has waited too long for that is shed (`too_late`).  An urgent
        one waits for urgent ones only: as long as these are the fewer, others make way.
        """
        if not self.targets.sheds or has_begun(request) or self._wakes():
            return False
        active = self.cluster.active.values()
        if request.urgent and 2 * sum(worker.urgent for worker in active) <= sum(worker.count for worker in active):
            return False
        return self.cluster.sleeping(request.kv_bytes) is None

    def too_late(self, request: Request) -> bool:
        """See `Policy.too_late`: while workers sleep or wake, nobody is sent away."""
        if not self._aims or not self._holds(request):
            return False
        return self.dispatch.too_late(request, self.prompts.seconds(request.prompt_tokens))

    def suspends(self, request: Request) -> bool:
        """See `Policy.suspends`."""
        return not self._aims or not self._holds(request)

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:
        """See `Policy.departed`."""
        super().departed(request, worker, destination)
        self.roles.handed(request, committed=False)
        if self._aims:
            self.dispatch.left(request.id, (worker, destination))

    def served(self, request: Request, event: RequestFinished) -> None:
        """See `Policy.served`."""
        self.roles.served(request, event.first_token_s)
        if event.first_token_s > 0.0:
            ttft_s, prefill_s = event.first_token_s - request.arrived_s, self.prompts.seconds(request.prompt_tokens)
            in_time = self.feedback.started(ttft_s, prefill_s)
            in_pace = self.feedback.ended(event.at_s - event.first_token_s, event.output_tokens, self.dispatch.pace_s())
            self.missing.ended(request.arrived_s, in_time and in_pace)
            self.dispatch.answers.ended(event.output_tokens)

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:
        """See `Policy.moved`."""
        if not self.roles.handed(request, committed=request.worker is destination):  # which waits for the first token
            super().moved(request, source, destination)
        if self._aims and request.worker is destination:
            self.dispatch.moved(request.id, source, destination)

    # ---- workers

    def paced(self, paces: dict[Worker, WorkerPace]) -> None:
        """See `Policy.paced`."""
        for worker, pace in paces.items():
            self.steps.observe(worker, pace)
            self.prompts.observe(pace)

    def epoch(self) -> None:
        """See `Policy.epoch`."""
        if not self._aims:
            super().epoch()
            return
        self.relieve()
        self._serve(0, Reason.SERVICE)
        self.missing.look()
        self.roles.look(self.demand.prefilling(), self.dispatch.pace_s())
        for request, after_first_token in list(self.roles.leavers()):
            self._hand_over(request, after_first_token)
        occupied = sum(worker.count > 0 for worker in self.cluster.active.values())
        self.gaps.needed(max(self.demand.workers, occupied), self.cluster.now_s)
        self.service.needed(self.demand.workers, self.cluster.now_s)
        self._empty_one()

    def role_of(self, worker: Worker) -> Role:
        """See `Policy.role_of`."""
        return self.roles.of(worker)

    def roles_because(self) -> str:
        """See `Policy.roles_because`."""
        return self.roles.because

    def sleeps_in_s(self, worker: Worker) -> float:
        """See `Policy.sleeps_in_s`: not within the service; beyond it once waking it again would be cheaper."""
        if not self._aims:
            return super().sleeps_in_s(worker)
        level = sum(one.order <= worker.order for one in self.cluster.active.values())
        if worker.wake_s or level <= self.demand.workers:
            return float("inf")
        if self.cluster.settings.retire_after_s is not None:
            return super().sleeps_in_s(worker)
        return 0.0 if worker.order == self._emptied else self._kept_s(self.gaps, level)

    def _kept_s(self, gaps: Gaps, level: int) -> float:
        """Return for how long so many workers are still kept, though fewer are needed by these gaps."""
        price_s = self._wake_s() + self.feedback.price_s
        return kept_s(gaps.of(level), price_s) - gaps.since_s(level, self.cluster.now_s)

    def _empty_one(self) -> None:
        """Move away what still runs on the youngest busy worker, once that is not worth being kept for the service.

        Where an operator says how long a worker without requests stays awake, streams may keep one awake, too.
        """
        if self.cluster.settings.retire_after_s is not None:
            return
        by_activation = sorted(self.cluster.active.values(), key=lambda worker: worker.order)
        serving = [one for one in by_activation[: self.demand.workers] if self.roles.of(one) is not Role.PREFILL]
        for level in range(len(by_activation), self.demand.workers, -1):
            worker = by_activation[level - 1]
            if worker.wake_s or not worker.count:
                continue
            requests = [request for request in worker.movable if request.decodes]
            if self._kept_s(self.service, level) > 0.0 or len(requests) < worker.count:
                return
            for request in sorted(requests, key=lambda one: (-one.kv_bytes, one.sequence)):
                near = (one for one in serving if not self.cluster.distances.is_far(worker, one))
                if (taker := self.dispatch.least_costly(request, near)) is None:
                    return
                self.cluster.assign(request, taker, Reason.DRAIN)
            self._emptied = worker.order
            return

    def _serve(self, kv_bytes: int, reason: Reason) -> None:
        """Wake the workers that the load needs and does not have."""
        ahead_s = self._wake_s() + constants.FILL_PART * self.settings.dispatch_life_s
        self.demand.look(self.dispatch.pace_s(), ahead_s, self.feedback.caution)
        while len(self.cluster.active) < self.demand.workers:
            if self.spare(kv_bytes, reason) is None:
                return

    def _wake_s(self) -> float:
        asleep = self.cluster.sleeping(0)
        return asleep.wake_s if asleep is not None else 0.0
