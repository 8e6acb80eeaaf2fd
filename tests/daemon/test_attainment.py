"""Service as promised: what the status and the metrics say of it."""

from melld.daemon.history import Attainment
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.reasons import Reason
from melld.scheduler.targets import Targets
from tests.scheduler.driving import scheduler_with

W0 = WorkerId("w0")
TARGETS = Targets(itl_s=0.05, ttft_s=2.0)


def served(attainment: Attainment, name: str, ttft_s: float, itl_s: float, tokens: int = 101, prompt: int = 10) -> None:
    """Play one request from arrival to end."""
    request, first_s = RequestId(name), 10.0 + ttft_s
    attainment.heard(events.RequestArrived(10.0, request, 1, prompt), [])
    end_s = first_s + itl_s * (tokens - 1)
    attainment.heard(events.RequestFinished(end_s, request, tokens, first_s), [])


def counts(attainment: Attainment) -> tuple[int, int, int, int]:
    return attainment.judged, attainment.in_time, attainment.in_pace, attainment.attained


def test_a_request_is_judged_by_its_first_token_and_its_pace() -> None:
    """Both count, separately and together."""
    attainment = Attainment(TARGETS, {})
    served(attainment, "good", 1.9, 0.049)
    served(attainment, "late", 2.1, 0.049)
    served(attainment, "slow", 1.9, 0.051)
    assert counts(attainment) == (3, 2, 2, 1)


def test_on_time_counts_and_unknown_requests_are_not_judged() -> None:
    """A daemon that has just started hears the end of requests that it has not seen arrive."""
    attainment = Attainment(TARGETS, {})
    served(attainment, "to the second", 2.0, 0.049)
    attainment.heard(events.RequestFinished(11.0, RequestId("stranger"), 100, 10.0), [])
    assert counts(attainment) == (1, 1, 1, 1)


def test_a_chunk_beside_a_short_answer_does_not_make_it_slow() -> None:
    """A pace is judged over 32 tokens at least."""
    attainment = Attainment(TARGETS, {})
    served(attainment, "short", 1.0, 0.5, tokens=4)
    assert counts(attainment) == (1, 1, 1, 1)


def test_a_shed_request_missed_and_an_abandoned_one_is_not_judged() -> None:
    """A service that turns half of its clients away has not kept its promise to them."""
    attainment = Attainment(TARGETS, {})
    sent_away = [(name, [events.ShedRequest(Reason.QUEUE_FULL, RequestId(name))]) for name in ("shed", "another")]
    for name, commands in (("gone", []), *sent_away):
        attainment.heard(events.RequestArrived(10.0, RequestId(name), 1, 10), commands)
        attainment.heard(events.RequestFinished(11.0, RequestId(name)), [])
    assert counts(attainment) == (2, 0, 0, 0)


def test_a_long_prompt_is_allowed_more_time() -> None:
    """Four times what its prompt takes alone, learned from the workers."""
    attainment = Attainment(TARGETS, scheduler_with().cluster.workers)
    for _ in range(20):
        pace = events.WorkerPace(prompts=1, prompt_tokens=1000, prefill_s=1.0)
        attainment.heard(events.WorkersPaced(5.0, {W0: pace}), [])
    served(attainment, "long", 3.5, 0.01, prompt=1000)
    served(attainment, "longer than that", 4.5, 0.01, prompt=1000)
    assert counts(attainment) == (2, 1, 2, 1)


def test_a_slow_model_is_held_to_twice_its_lone_step() -> None:
    """Nobody has to set a target: on a machine whose lone step takes 100 ms it is 200."""
    attainment = Attainment(Targets(itl_s=0.05, itl_steps=2.0), scheduler_with().cluster.workers)
    assert attainment.itl_target_s == 0.05
    for _ in range(200):
        attainment.heard(events.WorkersPaced(5.0, {W0: events.WorkerPace(0.1, 1.0, 1.0)}), [])
    assert 0.18 < (attainment.itl_target_s or 0.0) < 0.22


def test_a_refused_request_is_forgotten() -> None:
    """Nothing is kept of requests that could never run, however many come."""
    attainment = Attainment(TARGETS, {})
    request = RequestId("huge")
    refused = events.RefuseRequest(Reason.TOO_LARGE, request, 5, 4)
    attainment.heard(events.RequestArrived(10.0, request, 5, 10), [refused])
    assert attainment._arrived == {}
    assert counts(attainment) == (0, 0, 0, 0)
