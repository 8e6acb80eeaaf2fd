"""Promises of what the lengths of ended answers say about the pace of those that run."""

import math
import random

import pytest

from melld.scheduler.policies.slo.answers import Answers

TARGET_S, STEP_S = 0.05, 0.025
GAIN_S = TARGET_S - STEP_S


def learned(*lengths: int) -> Answers:
    """Answers of these lengths, seen a thousand times each."""
    answers = Answers()
    for _ in range(1000):
        for tokens in lengths:
            answers.ended(tokens)
    return answers


def test_the_lengths_that_were_seen_replace_those_assumed() -> None:
    """A service of short answers is judged by short answers."""
    answers = learned(40, 80)
    assert answers.longer(16) == pytest.approx(1.0, abs=0.02)
    assert answers.longer(64) == pytest.approx(0.5, abs=0.03)
    assert answers.longer(200) == pytest.approx(0.0, abs=0.02)


def test_a_pause_weighs_most_in_short_answers() -> None:
    """Half of the answers have 12 tokens, half 100: a pause is a twelfth, or a hundredth, longer per token."""
    assert learned(12, 100).share_of_token() == pytest.approx((1 / 12 + 1 / 100) / 2, rel=0.05)


def test_a_delay_that_a_request_can_make_up_for_harms_nothing() -> None:
    """Who has decoded below the target for long has room for a prompt beside it."""
    answers = learned(40, 80, 160)
    assert answers.made_slow(0.0, 0.5, 100.0, GAIN_S) == 0.0
    assert answers.made_slow(0.0, 0.5, 0.0, GAIN_S) == 0.0, "20 tokens, and the pace is judged over 32"


def test_a_delay_harms_those_that_may_end_before_they_have_made_up_for_it() -> None:
    """A quarter more ends between 32 and 100 tokens: so likely it is slow now."""
    answers = learned(40, 80, 160, 320)
    assert answers.made_slow(0.0, 100 * GAIN_S, 10.0, GAIN_S) == pytest.approx(0.5, abs=0.05)
    assert answers.made_slow(0.0, 100 * GAIN_S, 60.0, GAIN_S) == pytest.approx(1 / 3, abs=0.05)


def test_what_prompts_at_random_do_is_reckoned_as_it_comes() -> None:
    """The share of slow answers is within a factor of two of a simulation, from rare to frequent."""
    answers, chance = learned(40, 80, 160), random.Random(1)
    for prefilling in (0.2, 0.3, 0.4):
        slow = 0
        for _ in range(3000):
            tokens = chance.choice((40, 80, 160))
            left_s, total_s = tokens * STEP_S, tokens * STEP_S
            while left_s > 0.0:  # each second of decoding meets prompts of 0.1 s, at this rate per second in all
                until_s = chance.expovariate(prefilling / 0.1)
                left_s -= until_s
                total_s += 0.1 * (left_s > 0.0)
            slow += total_s > tokens * TARGET_S
        share = prefilling / (1.0 + prefilling)  # of all time, as the loop above lets them come in decoding time
        expected = answers.slow(STEP_S, TARGET_S, share, 0.1)
        assert expected == pytest.approx(slow / 3000, rel=1.0, abs=0.01)


def test_more_prompts_make_more_answers_slow() -> None:
    """The number of workers is found by raising it until the share is small: it must fall with less work each."""
    answers = learned(40, 80, 160)
    shares = [answers.slow(STEP_S, TARGET_S, share, 0.05) for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] > 0.2


def test_before_any_answer_has_ended_a_usual_mix_is_assumed() -> None:
    """Mostly of some hundred tokens."""
    answers = Answers()
    assert answers.longer(0) == pytest.approx(1.0)
    assert answers.longer(200) == pytest.approx(math.exp(-1), abs=0.01)
    assert answers.longer(400) == pytest.approx(math.exp(-2), abs=0.01)


def test_newer_answers_count_more_however_many_there_were() -> None:
    """After a month of short answers a new kind of load is known within some thousand."""
    answers = Answers()
    for tokens, count in ((40, 27_620), (200, 1_000)):
        for _ in range(count):
            answers.ended(tokens)
    assert answers.longer(100) == pytest.approx(1.0 - math.exp(-0.5), abs=0.02)


def test_answers_are_slow_where_prompts_take_more_than_steps_leave() -> None:
    """The prompts in the time of an answer vary by the root of that time, of their share and of their length."""
    answers = learned(100)
    spare_s, deviation_s = 128 * (0.05 * 0.85 - 0.04), math.sqrt(2.0 * 0.15 * 128 * 0.05 * 0.3)
    expected = 0.5 * math.erfc(spare_s / deviation_s)
    assert answers.slow(0.04, 0.05, 0.15, 0.3) == pytest.approx(expected, abs=0.02)


def test_without_prompts_answers_are_slow_if_steps_are() -> None:
    """All of them, but for short ones, whose pace is judged over more tokens."""
    assert learned(16, 80).slow(0.06, 0.05, 0.0, 0.1) == pytest.approx(0.5, abs=0.02)
    assert learned(40, 80, 160).slow(0.06, 0.05, 0.0, 0.1) == pytest.approx(1.0, abs=0.05)
    assert learned(40, 80, 160).slow(0.049, 0.05, 0.0, 0.1) == 0.0
