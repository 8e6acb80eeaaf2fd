"""Plan of a hole: which requests leave a worker so that a large one fits there.

Plans for the head of the line, where no worker has room and none can be woken; changes nothing itself.  A small one is
not worth a move: it fits as soon as any request ends.
"""

from melld.scheduler.policies.plus.drain import DrainPlan, takers
from melld.scheduler.policies.plus.outlook import Outlook
from melld.scheduler.priorities import class_of
from melld.scheduler.state import Request, Worker

LARGE_PART = 8
"""A request is large from this part of a worker's capacity on."""
LEAVERS = 8

HolePlan = tuple[Worker, DrainPlan]


def plan_hole(request: Request, outlook: Outlook, most_s: float) -> HolePlan | None:
    """Return the worker where the room is made soonest, and a taker for each that leaves it; None: nowhere in time.

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
    """Return the departures that make room on the worker: the smallest that is enough alone, else the largest first.

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
