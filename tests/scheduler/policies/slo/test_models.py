"""Promises of what mell-slo learns of steps and prompts."""

import random

import pytest

from melld.ids import WorkerId
from melld.scheduler.events import WorkerPace
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.state import Worker

CAPACITY = 1_000_000_000


def worker(name: str = "w0") -> Worker:
    """A worker of a gigabyte."""
    return Worker(WorkerId(name), CAPACITY, 64, 0, 1)


def truth_s(decodes: float, kv_bytes: float) -> float:
    """Seconds of a step on the machine that is learned."""
    return 0.02 + 1e-4 * decodes + 1e-11 * kv_bytes


def test_before_anything_was_seen_nothing_is_claimed() -> None:
    """A policy must not act on numbers that nobody measured."""
    model = StepModel()
    assert not model.known
    assert model.step_s(worker(), 10.0, 1e8) == 0.0
    assert PromptModel().seconds(1000) == 0.0


def test_a_full_worker_is_thought_slower_than_a_lone_step() -> None:
    """A first burst must not be taken for free because only lone steps were seen."""
    model = StepModel()
    model.observe(worker(), WorkerPace(0.02, 1.0, 1e6))
    assert model.step_s(worker(), 1.0, 1e6) == pytest.approx(0.02, rel=0.05)
    assert model.step_s(worker(), 40.0, 0.9 * CAPACITY) > 1.4 * 0.02


def test_steps_are_learned_from_what_workers_tell() -> None:
    """Within 3 % after some hundred reports of changing batches."""
    chance, model = random.Random(1), StepModel()
    for _ in range(300):
        decodes = chance.uniform(1.0, 60.0)
        kv_bytes = decodes * chance.uniform(5e6, 15e6)
        seconds = truth_s(decodes, kv_bytes) * chance.uniform(0.98, 1.02)
        model.observe(worker(), WorkerPace(seconds, decodes, kv_bytes))
    for decodes, kv_bytes in ((2.0, 1e7), (30.0, 3e8), (60.0, 8e8)):
        assert model.step_s(worker(), decodes, kv_bytes) == pytest.approx(truth_s(decodes, kv_bytes), rel=0.03)


def test_steps_that_grow_steeply_are_learned_from_small_batches() -> None:
    """On a slow device a second request may take half as long again as the first: no third is added to a full pace."""
    chance, model = random.Random(1), StepModel()
    for _ in range(60):
        decodes = chance.choice([1.0, 2.0])
        model.observe(worker(), WorkerPace(0.2 + 0.12 * decodes, decodes, 1e6 * decodes))
    assert model.step_s(worker(), 2.0, 2e6) == pytest.approx(0.44, rel=0.03)
    assert model.step_s(worker(), 3.0, 3e6) == pytest.approx(0.56, rel=0.1)


def test_a_slower_worker_has_its_own_factor() -> None:
    """One card that runs hot is not loaded like the others."""
    model, fast, slow = StepModel(), worker("fast"), worker("slow")
    for number in range(400):
        decodes = 1.0 + number % 40
        model.observe(fast, WorkerPace(truth_s(decodes, 1e7 * decodes), decodes, 1e7 * decodes))
        model.observe(slow, WorkerPace(1.5 * truth_s(decodes, 1e7 * decodes), decodes, 1e7 * decodes))
    ratio = model.step_s(slow, 20.0, 2e8) / model.step_s(fast, 20.0, 2e8)
    assert ratio == pytest.approx(1.5, rel=0.05)


def test_prompts_are_learned_with_what_grows_faster_than_their_length() -> None:
    """Attention over a long prompt costs more than in proportion: a queue of them must not be underrated."""
    chance, model = random.Random(1), PromptModel()

    def prompt_s(tokens: float) -> float:
        return 0.005 + 1e-4 * tokens + 4e-9 * tokens * tokens

    for _ in range(300):
        tokens = chance.randrange(50, 8000)
        model.observe(WorkerPace(prompts=1, prompt_tokens=tokens, prefill_s=prompt_s(tokens)))
    for tokens in (200, 2000, 8000):
        assert model.seconds(tokens) == pytest.approx(prompt_s(tokens), rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_short_prompts_do_not_make_a_long_one_look_endless(seed: int) -> None:
    """Chats tell little of how time grows with length: the first document must not keep all other workers awake."""
    chance, model = random.Random(seed), PromptModel()
    for _ in range(100):
        prompts = [round(chance.lognormvariate(5.5, 0.8)) for _ in range(chance.randint(1, 5))]
        seconds = sum(1e-4 * tokens for tokens in prompts) * chance.uniform(0.9, 1.1)
        model.observe(WorkerPace(prompts=len(prompts), prompt_tokens=sum(prompts), prefill_s=seconds))
    assert 3.0 < model.seconds(30_000) < 2.5 * 3.0


def test_what_long_prompts_took_is_believed_before_what_was_thought_of_them() -> None:
    """A model with sliding windows computes long prompts in proportion to their length."""
    chance, model = random.Random(1), PromptModel()
    for number in range(100):
        tokens = 30_000 if number % 5 == 0 else chance.randrange(50, 2000)
        model.observe(WorkerPace(prompts=1, prompt_tokens=tokens, prefill_s=1e-4 * tokens))
    assert model.seconds(30_000) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(("times", "ratio"), [(10.0, 4.0), (0.1, 0.25), (0.5, 0.5)])
def test_no_worker_is_thought_more_than_a_few_times_slower_or_faster(times: float, ratio: float) -> None:
    """A hiccup of seconds must not keep a worker empty for minutes."""
    model, usual, other = StepModel(), worker("usual"), worker("other")
    for number in range(400):
        decodes = 1.0 + number % 40
        model.observe(usual, WorkerPace(truth_s(decodes, 0.0), decodes, 0.0))
    for _ in range(100):
        model.observe(other, WorkerPace(times * model.step_s(None, 20.0, 0.0), 20.0, 0.0))
    assert model.step_s(other, 20.0, 0.0) / model.step_s(None, 20.0, 0.0) == pytest.approx(ratio, rel=0.05)


def test_a_lone_step_is_one_of_a_request_that_has_hardly_begun() -> None:
    """The best pace that there is; nothing before anything was seen."""
    model = StepModel()
    assert model.lone_step_s() == 0.0
    small = Worker(WorkerId("small"), 100, 64, 0, 1)
    for number in range(200):
        model.observe(small, WorkerPace(0.02 + 1e-3 * (number % 7) + 1e-4 * (number % 90), number % 7, number % 90))
    assert model.lone_step_s() == model.step_s(None, 1.0, 0.0) < model.step_s(None, 1.0, 1.0)
    assert model.lone_step_s() == pytest.approx(0.021, rel=0.05)


def test_old_steps_and_prompts_are_forgotten() -> None:
    """Clocks fall on a hot day: an hour later that is how fast the cards are."""
    steps, prompts = StepModel(), PromptModel()
    for times, count in ((1.0, 1000), (2.0, 3000)):
        for number in range(count):
            decodes, tokens = 1.0 + number % 40, 100 + number % 900
            steps.observe(worker(), WorkerPace(times * truth_s(decodes, 0.0), decodes, 0.0))
            prompts.observe(WorkerPace(prompts=1, prompt_tokens=tokens, prefill_s=times * 1e-4 * tokens))
    assert steps.step_s(None, 20.0, 0.0) == pytest.approx(2.0 * truth_s(20.0, 0.0), rel=0.03)
    assert prompts.seconds(500) == pytest.approx(2.0 * 0.05, rel=0.03)


def test_a_report_of_nothing_teaches_nothing() -> None:
    """A worker that was idle tells of no steps, and of no prompts."""
    steps, prompts = StepModel(), PromptModel()
    steps.observe(worker(), WorkerPace())
    prompts.observe(WorkerPace())
    prompts.observe(WorkerPace(prompts=1, prompt_tokens=10, prefill_s=0.0))
    prompts.observe(WorkerPace(prompts=0, prompt_tokens=0, prefill_s=0.1))
    assert (steps.known, prompts.seconds(100)) == (False, 0.0)
