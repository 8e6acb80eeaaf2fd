"""Attainment, goodput and the common bound mean what the page says."""

import json
from array import array

import msgspec
import numpy as np
import pytest

from benchmarks.targets.slowdowns import slowdowns
from melld.cli import main
from melld.scheduler.targets import Targets
from melld.simulator.measures import Measures
from melld.simulator.service import attainment, bound_gpu_s, union_s
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload
from tests.simulator.setups import SMALL, one_by_one
from tests.simulator.test_simulation import simulate

PROMISED = msgspec.structs.replace(SMALL, targets=Targets(itl_s=0.03))


def judged(load: Workload, *times: tuple[float, float], settings: SimulatorSettings = PROMISED) -> tuple[float, ...]:
    """Return the attainments of requests with these times of first and last token."""
    first_s, end_s = (np.array(column) for column in zip(*times, strict=True))
    met = attainment(settings, load, first_s, end_s)
    assert met.both is not None
    assert met.ttft is not None
    assert met.itl is not None
    assert met.served is not None
    return met.both, met.ttft, met.itl, met.served


def test_a_first_token_is_on_time_within_the_target_or_four_prompts() -> None:
    """Two seconds, or four times its own prefill time if that is longer."""
    load = one_by_one((100.0, 100, 50), (100.0, 100, 50), (100.0, 10_000, 50), (100.0, 10_000, 50))
    times = [(102.0, 103.0), (102.1, 103.0), (104.0, 105.0), (104.1, 105.0)]
    assert judged(load, *times) == (0.5, 0.5, 1.0, 2)


def test_a_short_answer_s_pace_is_averaged_over_32_tokens() -> None:
    """One chunk beside an answer of a few tokens does not make it slow."""
    load = one_by_one((100.0, 10, 13), (100.0, 10, 101), (100.0, 10, 101))
    assert judged(load, (100.1, 101.0), (100.1, 103.1), (100.1, 103.2)) == (2 / 3, 1.0, 2 / 3, 2)


def test_refused_requests_count_as_missed_and_the_first_minute_not_at_all() -> None:
    """A shed request was not served; those that came while the first workers woke say nothing about the policy."""
    nan = float("nan")
    load = one_by_one((59.0, 10, 50), (100.0, 10, 50), (101.0, 10, 50))
    assert judged(load, (70.0, 71.0), (100.1, 101.0), (nan, nan)) == (0.5, 0.5, 0.5, 1)
    assert judged(load.until(60.0), (70.0, 71.0))[0] == 0.0, "nothing came later: all count"


def test_the_bound_is_the_largest_of_memory_compute_and_presence() -> None:
    """No schedule needs less: each of the three can be the binding one."""
    lone = one_by_one((0.0, 100, 51), (10.0, 100, 51))
    assert bound_gpu_s(SMALL, lone) == pytest.approx(2 * (0.01 + 51 * 0.02)), "presence"
    crowd = one_by_one(*((0.0, 800, 800) for _ in range(40)))
    memory_s = 40 * (800 * 0.08 + 800 * 0.02 * 1200) / 1600
    assert bound_gpu_s(SMALL, crowd) == pytest.approx(memory_s), "memory"
    prompts = one_by_one(*((0.0, 1000, 1) for _ in range(40)))
    assert bound_gpu_s(SMALL, prompts) == pytest.approx(40 * (0.1 + 0.02 / SMALL.slots)), "compute"


def test_overlapping_intervals_count_once() -> None:
    """While several are there, one GPU is enough for the bound."""
    assert union_s(np.array([0.0, 1.0, 2.0, 10.0]), np.array([5.0, 2.0, 6.0, 11.0])) == pytest.approx(7.0)


def test_gpu_seconds_end_with_the_last_request() -> None:
    """How long a policy keeps workers after the load says nothing about the load."""
    report = simulate("best-fit", PROMISED, one_by_one((1.0, 100, 51), (1.0, 100, 101)))
    assert report.gpu_seconds == pytest.approx(0.01 + 0.01 + 100 * 0.02, rel=0.02)
    assert report.attainment == report.ttft_attainment == report.itl_attainment == 1.0
    assert report.goodput_per_gpu_second == pytest.approx(2 / report.gpu_seconds)
    assert simulate("best-fit", SMALL, one_by_one((1.0, 100, 51))).attainment is None


def test_the_json_has_the_figures_of_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts compare policies by these keys."""
    load = ["simulate", "--poisson", "2", "--lengths", "lognormal", "--seconds", "20", "--wake-s", "2", "--json"]
    assert main([*load, "--policy", "best-fit", "--itl-target-ms", "50", "--ttft-target-s", "3"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["policies"]
    assert 0 < report["bound_gpu_seconds"] <= report["gpu_seconds"]
    assert report["attainment"] <= min(report["ttft_attainment"], report["itl_attainment"])
    assert report["goodput_per_gpu_second"] > 0
    assert main([*load, "--policy", "best-fit"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"][0]["attainment"] is None


def test_slowdowns_are_relative_to_the_request_alone() -> None:
    """Prompts of 0.1 s and steps of 0.02 s; one a second too late, and one refused, are the slowest of each."""
    load = one_by_one(*((100.0, 1000, 101),) * 11)
    measures = Measures(PROMISED, load)
    measures.first_token_s[:] = array("d", [100.1] * 9 + [101.1, np.nan])
    lasted_s = [2.0] * 8 + [4.0, 4.0, np.nan]
    measures.end_times_s[:] = array("d", map(sum, zip(measures.first_token_s, lasted_s, strict=True)))
    found = slowdowns(measures)
    assert found.ttft == pytest.approx((1.0, 11.0, np.inf))
    assert found.tbt == pytest.approx((1.0, 2.0, np.inf))
    assert found.e2e == pytest.approx((1.0, 5.1 / 2.1, np.inf))
    assert found.missed == [f"{name} {part}" for name in ("ttft", "tbt", "e2e") for part in ("p90", "p99")]
