"""Plans for drains and for making room: a place for each departing request, all or nothing.

A drain empties a worker.  A hole is the room that some leave to a large request: for the head of the line, where no
worker has room and none can be woken.  A small one is not worth a move: it fits as soon as any request ends.

Changes nothing itself: `mell-plus` does.
"""

import heapq
from collections.abc import Callable

from melld.scheduler.policies.plus.outlook import Outlook
from melld.scheduler.policies.plus.settings import PlusSettings
from melld.scheduler.priorities import class_of
from melld.scheduler.state import Request, Worker

FEWER_LOOKS = 4  # times `looks`: workers to look at per request, because earlier requests fill some
LARGE_PART = 8
"""A request is large from this part of a worker's capacity on."""
LEAVERS = 8

DrainPlan = list[tuple[Request, Worker]]
HolePlan = tuple[Worker, DrainPlan]


def cheapest_drain(outlook: Outlook, settings: PlusSettings) -> tuple[Worker, DrainPlan] | None:
    """Return the first worker, by number of requests, that can be emptied, and how; None: none can."""

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
    """Return the tightest taker for each request that leaves the source, largest first, all or nothing.

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


def plan_hole(request: Request, outlook: Outlook, most_s: float) -> HolePlan | None:
    """Return the worker where room is made soonest, and a taker for each departure; None: nowhere in time.

    Takers are found all or nothing, and each then lasts until the next look, so no move costs another.
    """
    expected_s = outlook.moves.expected_s
    best: HolePlan | None = None
    best_cost: tuple[float, float] = most_s, float("inf")
    for worker in outlook.cluster.active.values():
        if request.kv_bytes * LARGE_PART < worker.capacity_bytes or worker.wake_s or worker.count >= worker.slots:
            continue
        plan = _emptied(request, worker, outlook)
        if plan is None:
            continue
        leaving_bytes = sum(leaver.kv_bytes for leaver, _ in plan)
        cost = expected_s(leaving_bytes), leaving_bytes  # they leave together: what a move takes by itself counts once
        if cost[0] <= most_s and cost < best_cost:
            best, best_cost = (worker, plan), cost
    return best


def _emptied(request: Request, worker: Worker, outlook: Outlook) -> DrainPlan | None:
    """Return the departures that make room on the worker: the smallest sufficient one, else the largest first.

    The least urgent leave first.
    """
    grown_bytes = (worker.count + 1) * outlook.growth_bytes_s(worker) * outlook.look_s(worker)
    ahead_bytes = max(grown_bytes, worker.capacity_bytes - worker.used_bytes - outlook.cluster.room_bytes(worker))
    need_bytes = worker.used_bytes + request.kv_bytes + ahead_bytes - worker.capacity_bytes
    if need_bytes <= 0 or worker.leaving:
        return None

    def away(leavers: list[Request]) -> DrainPlan | None:
        return takers(leavers, worker, outlook, LEAVERS, outlook.takes)

    leavers = [one for one in worker.movable if class_of(one.priority) >= class_of(request.priority)]
    leavers.sort(key=lambda one: (-class_of(one.priority), one.kv_bytes, one.sequence))
    for one in leavers:
        if worker.frees_bytes(one.kv_bytes) >= need_bytes and (plan := away([one])):
            return plan
    leavers = [one for one in leavers if away([one])]
    leavers.sort(key=lambda one: (-class_of(one.priority), -one.kv_bytes, one.sequence))
    left, chosen = need_bytes + worker.shared_bytes, list[Request]()
    for one in leavers[:LEAVERS]:
        chosen.append(one)
        left -= one.kv_bytes
        if left <= 0:
            return away(chosen)
    return None
