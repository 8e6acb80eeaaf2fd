"""The figures: all five are drawn, and equal runs draw equal bytes."""

import pathlib

from melld.simulator.experiment import Outcome, SchedulerChoices, run_policy
from melld.simulator.plots import draw_run
from tests.simulator.setups import PAPER_SLOTS, small_load


def outcome_of(policy: str, seed: int = 1) -> Outcome:
    return run_policy(policy, PAPER_SLOTS, small_load(seed), SchedulerChoices())


def draw(folder: pathlib.Path) -> dict[str, bytes]:
    """All figures of two policies; another policy's report stands for an unbatched form."""
    outcomes = [outcome_of("best-fit"), outcome_of("load-balance-eager")]
    paths = draw_run(folder, outcomes, [outcome_of("load-balance-eager", seed=2).report])
    assert sorted(paths) == sorted(folder.iterdir())
    return {path.name: path.read_bytes() for path in paths}


def test_the_papers_five_figures_are_drawn_and_reproducible(tmp_path: pathlib.Path) -> None:
    """A figure in the documentation must not change when nothing has."""
    first, second = draw(tmp_path / "first"), draw(tmp_path / "second")
    figures = ("fig11_gpus", "fig12_migrations", "fig13_batching", "fig14_utilisation", "fig15_over_time")
    assert set(first) == {f"{figure}.{kind}" for figure in figures for kind in ("png", "svg")}
    assert first == second
    for name, content in first.items():
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
        assert len(content) > 5000


def test_axes_say_what_they_measure(tmp_path: pathlib.Path) -> None:
    """A figure without units is a decoration."""
    text = b"".join(content for name, content in draw(tmp_path).items() if name.endswith("svg")).decode()
    for words in (
        "GPUs, mean over time",
        "migrations per second",
        "KV memory in use, % of GPUs awake",
        "time, minutes",
    ):
        assert f"<!-- {words} -->" in text, words
