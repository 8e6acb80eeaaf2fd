"""Draw GPU-seconds against attainment, one panel per load, from `results/slo.json`.

python benchmarks/slo_picture.py       # writes docs/figures/slo_frontier.png
"""

import re

from tables import ROOT, load

FIGURE = ROOT / "docs" / "figures" / "slo_frontier.png"
COLOURS = {
    "best-fit": "#bbbbbb",
    "worst-fit": "#4477aa",
    "load-balance": "#66ccee",
    "mell-plus": "#ccbb44",
    "mell-slo": "#ee6677",
}
COLUMNS = 6
CELL = re.compile(r"([\d,]+) / ([\d.]+)")


def main() -> None:
    """Draw."""
    from matplotlib.figure import Figure

    table = load("slo")
    lines = -(-len(table["rows"]) // COLUMNS)
    figure = Figure(figsize=(15.0, 2.6 * lines), layout="constrained")
    for number, row in enumerate(table["rows"]):
        plot = figure.add_subplot(lines, COLUMNS, number + 1)
        most_gpu_s = 0.0
        for policy, cell in zip(table["columns"][2:], row[2:], strict=True):
            found = CELL.match(cell)
            assert found is not None, cell
            gpu_s, attained = float(found[1].replace(",", "")), float(found[2])
            most_gpu_s = max(most_gpu_s, gpu_s)
            mark = "*" if policy == "mell-slo" else "o"
            plot.plot(
                [gpu_s],
                [attained],
                mark,
                color=COLOURS[policy],
                markersize=11 if policy == "mell-slo" else 7,
                alpha=0.85,
                label=policy,
            )
        plot.set_title(row[0], fontsize=9)
        plot.axhline(99.0, color="#888888", linewidth=0.6, linestyle=":")
        plot.set_ylim(0, 105)
        plot.set_xlim(0, 1.1 * most_gpu_s)
        plot.tick_params(labelsize=7)
        plot.xaxis.set_major_locator(_few())
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, title="x: GPU-seconds")
    figure.supylabel("requests within both targets, %", fontsize=9)
    figure.savefig(FIGURE, dpi=90, metadata={"Software": None})
    print(FIGURE)


def _few():  # type: ignore[no-untyped-def]
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


if __name__ == "__main__":
    main()
