"""Plan of a drain: a place for each of a worker's requests, all or nothing.

Plans one drain of `mell-plus`; changes nothing itself.
"""

import heapq
from collections.abc import Callable

from melld.scheduler.policies.plus.outlook import Outlook
from melld.scheduler.policies.plus.settings import PlusSettings
from melld.scheduler.state import Request, Worker

DrainPlan = list[tuple[Request, Worker]]
FEWER_LOOKS = 4  # times `looks`: workers to look at per request, because earlier requests fill some


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
    worker would have to be woken again.
    """

    def lasts(worker: Worker, kv_bytes: int, count: int) -> bool:
        lives = outlook.life_s(worker, kv_bytes, count) >= outlook.look_s(worker) + life_s
        return worker.count > 0 and lives and outlook.takes(worker, kv_bytes, count)

    requests = source.movable
    return takers(requests, source, outlook, candidates, lasts) if len(requests) == source.count else None


def takers(
    leavers: list[Request], source: Worker, outlook: Outlook, looks: int, takes: Callable[[Worker, int, int], bool]
) -> DrainPlan | None:
    """Return the tightest other worker that takes each of the source's leavers, all or nothing, the largest first.

    `takes`: whether a worker takes bytes and a number of requests, of all that is planned for it.
    """
    planned: dict[Worker, tuple[int, int]] = {}
    plan: DrainPlan = []
    for request in sorted(leavers, key=lambda one: (-one.kv_bytes, one.sequence)):
        for worker in outlook.candidates(request.kv_bytes, FEWER_LOOKS * looks, source):
            kv_bytes, count = planned.get(worker, (0, 0))
            kv_bytes, count = kv_bytes + request.kv_bytes, count + 1
            if takes(worker, kv_bytes, count):
                planned[worker] = kv_bytes, count
                plan.append((request, worker))
                break
        else:
            return None
    return plan
