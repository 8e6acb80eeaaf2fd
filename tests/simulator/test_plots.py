"""The figures: all five are drawn, and equal runs draw equal bytes."""

import pathlib
from typing import Any

import pytest

from melld.simulator.experiment import PolicyOutcome, SchedulerChoices, run_policy
from melld.simulator.plots import draw_run
from tests.simulator.setups import PAPER_SLOTS, small_load


def outcome_of(policy: str, seed: int = 1) -> PolicyOutcome:
    return run_policy(policy, PAPER_SLOTS, small_load(seed), SchedulerChoices())


def draw(folder: pathlib.Path) -> dict[str, bytes]:
    """All figures of two policies; another policy's report stands for an unbatched form."""
    outcomes = [outcome_of("best-fit"), outcome_of("load-balance-eager")]
    paths = draw_run(folder, outcomes, {"load-balance-eager": outcome_of("load-balance-eager", seed=2).report})
    assert sorted(paths) == sorted(folder.iterdir())
    return {path.name: path.read_bytes() for path in paths}


def test_the_papers_five_figures_are_drawn_and_reproducible(tmp_path: pathlib.Path) -> None:
    """A figure in the documentation must not change when nothing has."""
    first, second = draw(tmp_path / "first"), draw(tmp_path / "second")
    figures = ("fig11_gpus", "fig12_migrations", "fig13_batching", "fig14_utilisation", "fig15_over_time")
    assert set(first) == {f"{figure}.png" for figure in figures}
    assert first == second
    for content in first.values():
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_axes_say_what_they_measure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure without units is a decoration."""
    from matplotlib.figure import Figure  # a second in each process that reads this file

    labels: set[str] = set()

    def labels_of(figure: Any, path: pathlib.Path, **_: object) -> None:
        labels.update(label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()))
        path.write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", labels_of)
    draw(tmp_path)
    assert labels >= {
        "GPUs, mean over time",
        "migrations per second",
        "KV memory in use, % of GPUs awake",
        "time, minutes",
    }
