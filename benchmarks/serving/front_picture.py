"""Draw what a token and an event cost by kind of stream, from `results/front-path.json`.

python -m benchmarks.serving.front_picture       # writes docs/figures/front_path.png
"""

from benchmarks.harness import ROOT, load

FIGURE = ROOT / "docs" / "figures" / "front_path.png"


def main() -> None:
    """Draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    rows = load("front-path")["rows"][::-1]
    for plot, columns, what in zip(figure.subplots(1, 2), ((2, 3), (5, 6)), ("token", "event"), strict=True):
        looks = ("#4477aa", "melld", 0.2), ("#bbbbbb", "vLLM", -0.2)
        for column, (colour, name, shift) in zip(columns, looks, strict=True):
            costs = [float(row[column]) for row in rows]
            bars = plot.barh([place + shift for place in range(len(rows))], costs, 0.38, color=colour, label=name)
            plot.bar_label(bars, fontsize=7, padding=2)
        plot.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
        plot.set_title(f"processor time of the front per {what}, µs", fontsize=9)
        plot.tick_params(labelsize=8)
        plot.margins(x=0.15)
    figure.axes[1].set_xscale("log")
    figure.axes[0].legend(fontsize=8, loc="lower right")
    figure.savefig(FIGURE, dpi=90, metadata={"Software": None})
    print(FIGURE)


if __name__ == "__main__":
    main()
