"""Emptying a worker: plan a place for each of its requests, all or nothing.

Owns the plan of one drain of `mell-plus`; changes nothing itself.
"""

from itertools import islice

from melld.scheduler.policies.plus.outlook import Outlook, movable
from melld.scheduler.state import Request, Worker

Plan = list[tuple[Request, Worker]]
FEWER_LOOKS = 4  # how many times `candidates` are looked at per request, because earlier ones of the plan fill them


def plan_drain(source: Worker, outlook: Outlook, life_s: float, candidates: int) -> Plan | None:
    """Where each request of the worker can go so that the takers live `life_s`; None if one has no place.

    It is reckoned beyond the next look, because a taker is relieved a look before it would overflow; if that were soon,
    a worker would have to be woken again.  The largest are placed first, each where it fits most tightly.
    """
    requests = movable(source)
    if len(requests) < source.count:
        return None
    requests.sort(key=lambda request: (-request.kv_bytes, request.sequence))
    planned_bytes: dict[Worker, int] = {}
    planned: dict[Worker, int] = {}
    plan: Plan = []
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
