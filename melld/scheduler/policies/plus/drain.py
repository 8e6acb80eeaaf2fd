"""Plan of a drain: a place for each of a worker's requests, all or nothing.

Plans one drain of `mell-plus`; changes nothing itself.
"""

from itertools import islice

from melld.scheduler.policies.plus.outlook import Outlook, movable
from melld.scheduler.state import Request, Worker

DrainPlan = list[tuple[Request, Worker]]
FEWER_LOOKS = 4  # times `candidates`: workers to look at per request, because earlier requests fill some


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
        for worker in islice(outlook.cluster.room.tightest(request.kv_bytes), FEWER_LOOKS * candidates):
            more, more_bytes = planned.get(worker, 0) + 1, planned_bytes.get(worker, 0) + request.kv_bytes
            if worker is source or not worker.count:
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
