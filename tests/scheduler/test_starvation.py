"""How long a request waits at most, however many more urgent ones come: the bound in docs/scheduling.md.

`machine` holds, for all events in any order, that nobody goes before another beyond it; here everybody is served.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.ids import RequestId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.priorities import HIGH, Priorities, class_of
from tests.effort import examples
from tests.scheduler.driving import CAPACITY, arrive, finish, placed, scheduler_with

AGE_S = 4.0
PRIORITIES = (-7, -1, 0, 1, 9)
Came = tuple[int, int, int]


def bound_s(came_s: float, priority: int) -> float:
    """Return the latest arrival that still goes before: a class lasts `age_s`, as does the difference within one."""
    return came_s + (class_of(priority) - HIGH + 1) * AGE_S


@pytest.mark.parametrize("policy", ["best-fit", "mell-plus", "mell-slo"])
@settings(max_examples=examples(40), deadline=None)
@given(
    come=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(PRIORITIES), st.integers(1, CAPACITY)), min_size=1, max_size=25
    ),
    flood=st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=3),
)
def test_every_request_is_served_as_if_it_had_arrived_later_by_its_bound(
    policy: str, come: list[Came], flood: list[int]
) -> None:
    """Every second request ends while more come, without end: only those that came by its bound go before."""
    priorities = Priorities(age_s=AGE_S, hole_s=0.0, suspend=False)
    scheduler = scheduler_with(1, policy, slots=3, cluster=ClusterSettings(priorities=priorities))
    came: dict[str, tuple[float, int]] = {}
    served: dict[str, float] = {}
    running: list[str] = []
    now_s = 0.0

    def heard(commands: list[e.AnyCommand]) -> None:
        for name in placed(commands):
            assert name not in served
            served[name] = now_s
            running.append(name)

    def comes(name: str, priority: int, kv_bytes: int) -> None:
        came[name] = now_s, priority
        heard(arrive(scheduler, RequestId(name), kv_bytes, now_s, priority))

    for number, (later_s, priority, kv_bytes) in enumerate(come):
        now_s += later_s
        comes(f"r{number}", priority, kv_bytes)
    first_end_s = now_s + 1.0
    while any(f"r{number}" not in served for number in range(len(come))):
        now_s += 1.0
        assert running, "they wait for nobody"
        heard(finish(scheduler, running.pop(0), now_s))
        for number, priority in enumerate(flood):
            comes(f"flood{now_s}-{number}", priority, 900)
        heard(scheduler.handle(e.EpochStarted(now_s)))
    order = list(served)
    for number in range(len(come)):
        name = f"r{number}"
        last_s = bound_s(*came[name])
        before = order[: order.index(name)]
        assert all(came[other][0] <= last_s for other in before)
        assert served[name] <= max(last_s, first_end_s) + len([one for one in came.values() if one[0] <= last_s])
