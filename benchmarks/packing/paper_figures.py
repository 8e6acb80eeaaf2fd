"""The paper's figures 11 to 15 as PNG, drawn from reports and samples.

Takes groups of reports: a group is a workload (labelled on the axis) with one list of reports per policy, one report
per seed.  Equal input gives equal bytes.  matplotlib is imported on first use.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from melld.simulator.measures import Report, Samples

Groups = Mapping[str, Mapping[str, Sequence[Report]]]
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#222222")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
WIDE, HIGH = 7.5, 4.2


def draw_groups(directory: pathlib.Path, groups: Groups) -> list[pathlib.Path]:
    """Draw figures 11 (GPUs), 12 (migration frequency) and 14 (utilisation), by workload and policy."""
    return [
        _draw(directory, "fig11_gpus", lambda plot: _gpus(plot, groups)),
        _draw(directory, "fig12_migrations", lambda plot: _migrations(plot, groups)),
        _draw(directory, "fig14_utilisation", lambda plot: _utilisation(plot, groups)),
    ]


def draw_batching(
    directory: pathlib.Path, groups: Mapping[str, Mapping[str, tuple[Sequence[Report], Sequence[Report]]]]
) -> list[pathlib.Path]:
    """Draw figure 13, migrations with and without operation batching, from pairs of report lists."""
    flat: dict[str, dict[str, Sequence[Report]]] = {}
    for workload, pairs in groups.items():
        for policy, (batched, one_by_one) in pairs.items():
            label = policy if len(groups) == 1 else f"{policy}\n{workload}"
            flat[label] = {"batched per epoch": batched, "each operation at once": one_by_one}

    def draw(plot: Any) -> None:
        figure, axes = plot.subplots(figsize=(WIDE, HIGH))
        _bars(axes, flat, lambda report: report.migrations_per_request)
        axes.set_ylabel("migrations per request")
        axes.set_title("Operation batching (the paper's Fig. 13)")
        _legend(figure)

    return [_draw(directory, "fig13_batching", draw)]


def draw_over_time(directory: pathlib.Path, samples: Mapping[str, Samples]) -> list[pathlib.Path]:
    """Draw figure 15: GPUs awake over time and the lower bound at the same instants, for each policy."""

    def draw(plot: Any) -> None:
        rows = -(-len(samples) // 2)
        figure, grid = plot.subplots(
            rows, min(2, len(samples)), figsize=(WIDE, 0.8 + 1.9 * rows), sharex=True, sharey=True, squeeze=False
        )
        for place, axes in enumerate(grid.flat):
            if place >= len(samples):
                axes.set_visible(False)
                continue
            policy, taken = list(samples.items())[place]
            minutes = np.array(taken.at_s) / 60
            axes.step(minutes, taken.gpus, where="post", color=COLOURS[4], linewidth=1, label="GPUs awake")
            axes.step(minutes, taken.bound, where="post", color=COLOURS[0], linewidth=1, label="lower bound")
            axes.set_title(policy, fontsize=9)
            axes.grid(alpha=0.3)
        most = max((max(taken.gpus, default=0) for taken in samples.values()), default=0)
        grid[0, 0].set_ylim(0, 1.05 * max(most, 1))  # shared by all
        for axes in grid[:, 0]:
            axes.set_ylabel("GPUs")
        for axes in grid[-1, :]:
            axes.set_xlabel("time, minutes")
        figure.suptitle("GPUs over time and the lower bound at each instant (the paper's Fig. 15)", fontsize=10)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)

    return [_draw(directory, "fig15_over_time", draw)]


def _gpus(plot: Any, groups: Groups) -> None:
    figure, (means, peaks) = plot.subplots(2, 1, figsize=(WIDE, 1.5 * HIGH), sharex=True)
    _bars(means, groups, lambda report: report.mean_gpus)
    _bounds(means, groups, lambda report: report.mean_bound)
    means.set_ylabel("GPUs, mean over time")
    means.set_title("GPUs in use; black ticks: the lower bound of each run (the paper's Fig. 11)")
    _bars(peaks, groups, lambda report: report.peak_gpus, labelled=False)
    _bounds(peaks, groups, lambda report: report.peak_bound)
    peaks.set_ylabel("GPUs, peak")
    _legend(figure)


def _migrations(plot: Any, groups: Groups) -> None:
    figure, (per_s, per_request) = plot.subplots(2, 1, figsize=(WIDE, 1.5 * HIGH), sharex=True)
    _bars(per_s, groups, lambda report: report.migrations_per_s)
    per_s.set_ylabel("migrations per second")
    per_s.set_title("Migration frequency (the paper's Fig. 12)")
    _bars(per_request, groups, lambda report: report.migrations_per_request, labelled=False)
    per_request.set_ylabel("migrations per request")
    _legend(figure)


def _utilisation(plot: Any, groups: Groups) -> None:
    figure, axes = plot.subplots(figsize=(WIDE, HIGH))
    _bars(axes, groups, lambda report: 100 * report.utilisation)
    axes.set_ylabel("KV memory in use, % of GPUs awake")
    axes.set_ylim(0, 100)
    axes.set_title("KV utilisation (the paper's Fig. 14)")
    _legend(figure)


def _bars(axes: Any, groups: Groups, value: Callable[[Report], float], labelled: bool = True) -> None:
    """Draw one cluster of bars per group, one bar per policy; whiskers span the seeds."""
    policies = list(dict.fromkeys(policy for group in groups.values() for policy in group))
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        middles, heights, below, above = [], [], [], []
        for index, group in enumerate(groups.values()):
            values = [value(report) for report in group.get(policy, ())]
            if not values:
                continue
            mean = float(np.mean(values))
            middles.append(index + (place - (len(policies) - 1) / 2) * width)
            heights.append(mean)
            below.append(mean - min(values))
            above.append(max(values) - mean)
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(middles, heights, 0.92 * width, color=colour, label=policy if labelled else None)
        if any(below) or any(above):
            axes.errorbar(middles, heights, yerr=[below, above], fmt="none", ecolor="#444444", elinewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _bounds(axes: Any, groups: Groups, value: Callable[[Report], float]) -> None:
    policies = list(dict.fromkeys(policy for group in groups.values() for policy in group))
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        for index, group in enumerate(groups.values()):
            if group.get(policy):
                middle = index + (place - (len(policies) - 1) / 2) * width
                height = float(np.mean([value(report) for report in group[policy]]))
                axes.hlines(height, middle - 0.46 * width, middle + 0.46 * width, color="black", linewidth=1.5)


def _legend(figure: Any) -> None:
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _draw(directory: pathlib.Path, name: str, draw: Callable[[Any], None]) -> pathlib.Path:
    import matplotlib as mpl

    mpl.use("Agg", force=True)
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({**STYLE, "figure.constrained_layout.use": True}):
        draw(pyplot)
        figure = pyplot.gcf()
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=140, metadata={"Software": None})
        pyplot.close(figure)
    return path
