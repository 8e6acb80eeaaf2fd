"""Plan of a drain: a place for each of a worker's requests, all or nothing.

Plans one drain of `mell-plus`; changes nothing itself.
"""

import heapq

from melld.scheduler.policies.plus.outlook import Outlook, movable
from melld.scheduler.policies.plus.settings import PlusSettings
from melld.scheduler.state import Request, Worker

DrainPlan = list[tuple[Request, Worker]]
FEWER_LOOKS = 4  # times `candidates`: workers to look at per request, because earlier requests fill some


def cheapest_drain(outlook: Outlook, settings: PlusSettings) -> tuple[Worker, DrainPlan] | None:
    """Return the first of the workers with fewest requests that can be emptied, and how; None: none can."""

    def cost(worker: Worker) -> tuple[int, int, int]:
        return (worker.count, worker.used_bytes, worker.order)

    occupied = [worker for worker in outlook.cluster.active.values() if worker.count > worker.leaving]
    for worker in heapq.nsmallest(settings.drain_attempts, occupied, key=cost):
        if plan := plan_drain(worker, outlook, settings.drain_life_s, settings.candidates):
            return worker, plan
    return None


def plan_drain(source: Worker, outlook: Outlook, life_s: float, candidates: int) -> DrainPlan | None:
    """Return a taker for each of the worker's requests such that all takers live `life_s`, or None.

    That life counts from the next look, because a taker is relieved a look before it overflows; if that came soon, a
    worker would have to be woken again.  The largest requests are placed first, each on the tightest worker.
    """
    requests = movable(source)
    if len(requests) < source.count:
        return None
    requests.sort(key=lambda request: (-request.kv_bytes, request.sequence))
    planned_bytes: dict[Worker, int] = {}
    planned: dict[Worker, int] = {}
    plan: DrainPlan = []
    for request in requests:
        taker: Worker | None = None
        for worker in outlook.candidates(request.kv_bytes, FEWER_LOOKS * candidates, source):
            more, more_bytes = planned.get(worker, 0) + 1, planned_bytes.get(worker, 0) + request.kv_bytes
            if not worker.count:
                continue
            lasts = outlook.life_s(worker, more_bytes, more) >= outlook.look_s(worker) + life_s
            if lasts and outlook.takes(worker, more_bytes, more):
                taker = worker
                break
        if taker is None:
            return None
        planned[taker], planned_bytes[taker] = more, more_bytes
        plan.append((request, taker))
    return plan
